#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "csrc/health/fault_board.h"
#include "csrc/lanes/device_lane.h"
#include "csrc/lanes/slot_ring.h"
#include "tests/cpp/lanes/fake_times.h"

namespace smp::lanes {

/// A lane of CPU tensors for tests, as hasty as one of devices: on both sides a
/// thread copies after a random time, so that copies end in any order, and the
/// destination is full of NaN until its mark is over. The thread that uses the
/// data plays the stream that waits. Bytes travel in the message.
class FakeLane final : public DeviceLane {
 public:
  FakeLane(FakeOptions options, int global_rank,
           std::shared_ptr<health::FaultBoard> faults, SendReceipt receipts);
  ~FakeLane() override;

  std::optional<Posted> post(int dst, const at::Tensor& data,
                             bool is_stable) override;
  at::Tensor new_payload(const Descriptor& descriptor) const override;
  bool take_may_block() const override { return options_.has_late_takes; }
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload) override;
  void acknowledge(int src, const Receipt& receipt) override;
  void stop() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Copy {
    std::shared_ptr<LateEvent> end;
    std::function<void()> run;
  };

  memory::MarkedTensor copy_later(at::Tensor source,
                                  std::function<void()> then);
  void run_copies();
  void block_for_a_while();

  const FakeOptions options_;
  const std::shared_ptr<health::FaultBoard> faults_;
  const SendReceipt receipts_;
  SlotRing slots_;
  ArrivalOrder arrivals_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  CopyTimes times_;  // with `mutex_`
  std::multimap<Clock::time_point, Copy> copies_;
  std::thread thread_;
};

}  // namespace smp::lanes
