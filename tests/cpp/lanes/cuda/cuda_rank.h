#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/flight_watch.h"
#include "csrc/lanes/lane_table.h"
#include "tests/cpp/lanes/cuda/kernel_group.h"
#include "tests/cpp/lanes/cuda/ranks.h"

namespace smp::lanes {

struct CudaRankOptions {
  uint64_t seed = 1;
  int max_us = 300;  ///< longest time of a copy
  bool has_ring = true;
  KernelPlaces* places = nullptr;  ///< of channels; null: there are none
  int num_channels = 2;
  RingOptions ring = {.num_slots = 3, .slot_bytes = 16 << 10};
  int num_devices = 4;  ///< ranks use them in turn
  /// Set if the script has made another device the current one before.
  bool is_elsewhere = false;
  /// Set if streams of odd ranks have much to do when the lanes are made.
  bool is_busy = false;
};

/// Begins the calls of a rank's process, on its device.
c10::Device begin_rank(const Links& links, const CudaRankOptions& options);

/// A rank with the lanes of the library over the stand-in for CUDA, and letters
/// in place of the mailbox. As there, a thread receives letters, handles
/// receipts and sends what may leave, and another one takes tensors if that may
/// block. Other tensors are taken by `turn`, so that tests can be late.
class CudaRank {
 public:
  CudaRank(Links& links, const CudaRankOptions& options, c10::Device device);
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  /// Posts a tensor; its letter leaves in this order, once it may.
  LaneKind post(int dst, const at::Tensor& data, bool is_stable);
  /// Waits a moment for a tensor that comes. @return whether one came
  /// @throws what a thread of this rank has thrown; PeerFailure when there is a
  ///         fault
  bool turn();
  /// Works until all that was posted has left.
  void flush();

  /// Throws as `turn` does.
  void raise_if_failed() const;
  /// Returns how many receipts were handled.
  int num_receipts() const;

  /// Tensors that came before the last turn ended, by rank and in their order.
  std::map<int, std::deque<memory::MarkedTensor>> came;
  LaneTable& table() { return *table_; }
  Links& links() const { return links_; }
  c10::Device device() const { return device_; }

 private:
  struct Arrival {
    int src = -1;
    memory::MarkedTensor tensor = {};
  };

  struct Leaving {
    Posted posted = {};
    memory::Mark mark = {};  // for which the letter waits
    bool has_asked = false;  // for its turn
  };

  bool may_leave(int dst, Leaving& first);
  void send_what_may_leave();
  bool are_leaving();
  Arrival take(int src, Letter letter);
  void run(const std::function<void()>& body);
  void receive();
  void take_tensors();

  Links& links_;
  const c10::Device device_;
  comm::FlightWatchPtr flights_;
  std::unique_ptr<LaneTable> table_;
  std::mutex leaving_mutex_;
  std::map<int, std::deque<Leaving>> leaving_;  // by destination

  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<std::pair<int, Letter>> letters_;  // with tensors to take
  std::deque<Arrival> arrivals_;                // taken by the thread
  std::exception_ptr error_;                    // of a thread
  int num_receipts_ = 0;
  bool is_ending_ = false;    // nothing is sent or taken any more
  bool has_stopped_ = false;  // the lanes
  std::thread receiver_;
  std::thread taker_;  // if there are channels
};

/// The n-th tensor from one rank to another one: its dtype, sizes and bytes.
at::Tensor expected_tensor(int src, int dst, int index, uint64_t seed);
/// Expects the bytes of a tensor that came. Polls, because a copy from a rank
/// that dies never ends. @throws PeerFailure when there is a fault
void expect_bytes(const CudaRank& rank, memory::MarkedTensor came,
                  const at::Tensor& expected);

/// Sends tensors to each other rank, of which each is written to or freed once
/// it is posted, and expects theirs.
void exchange_tensors(CudaRank& rank, int num_tensors, uint64_t seed);

/// Expects that this process has nothing open, has at most the memory of a ring
/// on its device, and has done nothing undefined.
void expect_released(c10::Device device, const CudaRankOptions& options);

/// Makes lanes, exchanges tensors, ends the lanes `num_times`, and expects that
/// all is released, and that the process has a context on its device only.
void run_exchange(Links& links, const CudaRankOptions& options, int num_tensors,
                  int num_times = 1);

/// Ranks that exchange tensors over lanes of one kind.
struct Scenario {
  std::string name;
  int num_ranks = 2;
  CudaRankOptions options = {};
  int num_channels = 0;
  int num_tensors = 60;
  int num_times = 1;
};
std::vector<Scenario> all_scenarios();
std::vector<RankEnd> run_scenario(
    Scenario scenario, uint64_t seed,
    std::chrono::seconds patience = std::chrono::seconds(120));

}  // namespace smp::lanes
