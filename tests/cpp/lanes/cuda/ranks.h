#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/descriptor.h"

namespace smp::lanes {

/// A message between ranks of a test, in place of those of the mailbox.
struct Letter {
  enum class Kind : int32_t { kTensor, kReceipt, kBytes, kGoodbye };
  Kind kind = Kind::kBytes;
  Descriptor descriptor = {};  ///< also of a receipt: lane, slot, sequence
  std::string bytes = {};
};

/// The connections of a rank, with a thread that receives. A peer whose
/// connection ends without a goodbye becomes a fault of the board. Thread-safe,
/// apart from `exchange`, which has letters of its own: one at a time.
class Links {
 public:
  Links(int rank, std::vector<int> sockets);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(sockets_.size()); }
  const std::shared_ptr<health::FaultBoard>& board() const { return board_; }

  void send(int dst, const Letter& letter);
  /// Returns the next letter that is not of an exchange.
  std::optional<std::pair<int, Letter>> next(std::chrono::microseconds most);
  /// Sends bytes to all ranks and returns those of all.
  /// @throws PeerFailure when there is a fault
  std::vector<std::string> exchange(const std::string& own);
  /// Tells all ranks that this one ends.
  void say_goodbye();

 private:
  void receive();
  void add(int src, Letter letter);

  const int rank_;
  const std::vector<int> sockets_;  // by rank; -1: this one
  const std::shared_ptr<health::FaultBoard> board_;
  std::mutex send_mutex_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int, Letter>> letters_;
  std::vector<std::deque<std::string>> exchanged_;  // by rank
};

/// The end of a rank's process.
struct RankEnd {
  int code = -1;  ///< 0: all that the rank expected was so
  int signal = 0;
  bool has_hung = false;  ///< it was ended by the test
  std::string output = {};

  bool is_good() const { return code == 0 && signal == 0 && !has_hung; }
};

/// Runs ranks as forked processes; `of_rank` may use EXPECT.
std::vector<RankEnd> run_ranks(
    int size, const std::function<void(Links&)>& of_rank,
    std::chrono::seconds patience = std::chrono::seconds(120));

/// Expects that all ranks have ended well; shows what the others have printed.
void expect_good(const std::vector<RankEnd>& ends);

}  // namespace smp::lanes
