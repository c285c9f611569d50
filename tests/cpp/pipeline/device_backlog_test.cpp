// Ranks that all wait for what a device still has to compute are no deadlock;
// ranks whose devices hang are one.

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/health/liveness.h"
#include "csrc/mailbox/mailbox.h"
#include "csrc/memory/device_meter.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/step_wait.h"
#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/health/liveness_world.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::pipeline {
namespace {

using std::chrono::milliseconds;

constexpr int kSize = 2;
constexpr int kNumTasks = 12;
constexpr milliseconds kPerTask{150};  // of a device
constexpr milliseconds kLongestTask{600};

// One rank in a step whose body asks the device for many tasks, and then waits
// until the last one is done, as a caller does that needs its result.
class BacklogRank {
 public:
  BacklogRank(int rank, const comm::CommunicatorPtr& world,
              std::shared_ptr<health::FaultBoard> board)
      : stream_(fake_device::new_stream(rank + 1)),
        board_(std::move(board)),
        mailbox_(std::make_shared<mailbox::Mailbox>(world, board_)),
        meter_(std::make_shared<memory::DeviceMeter>(
            stream_.device(),
            memory::DeviceMeter::Options{.longest_task = kLongestTask})),
        scheduler_(&threads_, stream_.device(), nullptr, mailbox_.get(),
                   meter_) {
    board_->waits().add_source([meter = meter_] { return meter->read(); });
    options_.device = stream_.device();
    options_.device_meter = meter_;
    options_.timeout = std::chrono::seconds(60);
  }

  const c10::Stream& stream() const { return stream_; }

  void run_step() {
    const c10::StreamGuard guard(stream_);
    const auto policy = schedule::make_policy("interleaved");
    StepOptions step;
    step.policy = policy.get();
    step.num_microbatches = step.active_microbatches = 1;
    step.is_driver = true;
    scheduler_.begin_step(step);
    Slot slot;
    scheduler_.add_body(0, "body", 0, [&] {
      for (int i = 1; i < kNumTasks; ++i) {
        fake_device::launch([] {});
        meter_->mark();
      }
      fake_device::launch([&] { scheduler_.fill(slot, {}); });
      scheduler_.wait(slot, "the device", -1);
    });
    try {
      await_end();
    } catch (const std::exception& error) {
      scheduler_.cancel(std::make_exception_ptr(error));
      scheduler_.wait_until_idle(std::chrono::seconds(120));
    }
    fake_device::run(stream_);  // what refers to this step
    scheduler_.end_step();
  }

 private:
  void await_end() {
    std::mutex mutex;
    std::condition_variable changed;
    StepWait wait(options_, mailbox_, board_, scheduler_);
    std::unique_lock lock(mutex);
    wait.until(lock, changed,
               {.is_over = [this] { return scheduler_.is_idle(); },
                .ranks_needed = [] { return std::vector<int>(); },
                .describe = [] { return std::string("a step"); }});
  }

  const c10::Stream stream_;
  const std::shared_ptr<health::FaultBoard> board_;
  const std::shared_ptr<mailbox::Mailbox> mailbox_;
  const std::shared_ptr<memory::DeviceMeter> meter_;
  ServerOptions options_;
  ContextThreads threads_;
  Scheduler scheduler_;
};

class DeviceBacklog : public testing::Test {
 protected:
  DeviceBacklog() {
    fake_device::reset();
    fake_device::set_lazy(true);
  }
  ~DeviceBacklog() override { fake_device::reset(); }

  // One step on each rank, over devices that do a task in `kPerTask`, or none.
  void run_ranks(bool devices_run) {
    comm::run_ranks(kSize, [&](int rank, const comm::CommunicatorPtr& world) {
      BacklogRank self(rank, world, liveness.boards[rank]);
      std::atomic<bool> is_over{false};
      std::thread device([&] {
        while (!is_over && devices_run) {
          std::this_thread::sleep_for(kPerTask);
          fake_device::run(self.stream(), 2);  // a task and its mark
        }
      });
      self.run_step();
      is_over = true;
      device.join();
    });
  }

  health::World liveness{kSize};  // 0.4 s without progress are a deadlock
};

TEST_F(DeviceBacklog, that_shrinks_is_no_deadlock) {
  static_assert(kNumTasks * kPerTask > 4 * milliseconds(400));
  run_ranks(true);
  for (const auto& board : liveness.boards) EXPECT_FALSE(board->fault());
  liveness.leave_all();
}

TEST_F(DeviceBacklog, that_never_shrinks_is_one) {
  run_ranks(false);
  const auto fault = liveness.fault_at(1);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind, health::Fault::Kind::kDeadlock);
  EXPECT_NE(fault->text.find("a step"), std::string::npos) << fault->text;
}

}  // namespace
}  // namespace smp::pipeline
