#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/lanes/ipc_lane.h"
#include "tests/cpp/lanes/fake_copies.h"

namespace smp::lanes {

/// A rank with a ring, without messages: its receipts are kept.
struct RingRank {
  RingRank(FakeOptions options, int the_rank)
      : lane(make_fake_copies(options, the_rank, board),
             {.num_slots = options.num_slots, .slot_bytes = options.slot_bytes},
             the_rank, board, [this](int dst, const Receipt& receipt) {
               std::lock_guard lock(mutex);
               receipts.emplace_back(dst, receipt);
             }) {}

  std::vector<std::pair<int, Receipt>> taken_receipts() {
    std::lock_guard lock(mutex);
    return std::exchange(receipts, {});
  }

  std::shared_ptr<health::FaultBoard> board =
      std::make_shared<health::FaultBoard>(1);
  std::mutex mutex;
  std::vector<std::pair<int, Receipt>> receipts;
  IpcLane lane;
};

/// Ranks 0 and 1, which have opened each other.
struct RingPair {
  RingPair(FakeOptions options_of_0, FakeOptions options_of_1)
      : first(options_of_0, 0), second(options_of_1, 1) {
    const std::string of_first = first.lane.offer({1});
    const std::string of_second = second.lane.offer({0});
    first.lane.open(1, of_second);
    second.lane.open(0, of_first);
  }
  explicit RingPair(FakeOptions options) : RingPair(options, options) {}
  /// Ends waits for copies that do not end.
  ~RingPair() {
    for (RingRank* const rank : {&first, &second}) {
      rank->board->report({.global_rank = 0, .text = "the test is over"});
    }
  }

  RingRank first;
  RingRank second;
};

/// Byte strings of threads to each other: what an exchange of ranks is.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  std::vector<std::string> exchange(int rank, const std::string& own) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (coming_.empty()) coming_.resize(size_);
    coming_[rank] = own;
    if (++num_here_ == size_) {
      last_ = std::exchange(coming_, {});
      num_here_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return last_;
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int round_ = 0;
  int num_here_ = 0;
  std::vector<std::string> coming_;
  std::vector<std::string> last_;
};

}  // namespace smp::lanes
