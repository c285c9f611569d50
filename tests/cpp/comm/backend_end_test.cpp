// Tests what `abort` does to a backend of torch.distributed.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "csrc/comm/c10d_communicator.h"
#include "csrc/common/check.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;

// The kernels of a process, which run until an abort.
struct Kernels {
  void end() {
    const std::lock_guard lock(mutex);
    ++num_aborts;
    changed.notify_all();
  }
  bool have_ended() {
    const std::lock_guard lock(mutex);
    return num_aborts > 0;
  }
  bool end_after(int count, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, limit, [&] { return num_aborts >= count; });
  }

  std::mutex mutex;
  std::condition_variable changed;
  int num_aborts = 0;
};

class SpinningWork final : public c10d::Work {
 public:
  explicit SpinningWork(std::shared_ptr<Kernels> kernels)
      : kernels_(std::move(kernels)) {}
  bool isCompleted() override { return kernels_->have_ended(); }
  bool wait(std::chrono::milliseconds) override { return true; }

 private:
  const std::shared_ptr<Kernels> kernels_;
};

// A device whose collectives never end: the other rank is gone.
class SpinningBackend final : public c10d::Backend {
 public:
  SpinningBackend(std::string name, std::shared_ptr<Kernels> kernels,
                  int aborts_needed = 1)
      : Backend(0, 2),
        name_(std::move(name)),
        kernels_(std::move(kernels)),
        aborts_needed_(aborts_needed) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<SpinningWork>(kernels_);
  }
  // Overrides that of Backend, which releases of torch before 2.7 do not have.
  void abort() {
    kernels_->end();
    // NCCL's abort frees memory, too, and so waits for kernels of other groups.
    has_ended = kernels_->end_after(aborts_needed_, std::chrono::seconds(10));
  }

  std::atomic<bool> has_ended = false;

 private:
  const std::string name_;
  const std::shared_ptr<Kernels> kernels_;
  const int aborts_needed_;
};

// Makes a communicator as the extension does for NCCL: where Backend cannot
// abort, the class itself ends what it has in flight.
template <typename Backend = c10d::Backend>
CommunicatorPtr communicator_of(
    const c10::intrusive_ptr<SpinningBackend>& backend,
    const std::string& name) {
  if constexpr (requires(Backend& any) { any.abort(); }) {
    return make_c10d_communicator(backend, name);
  } else {
    return make_c10d_communicator(backend, name,
                                  {.end = [backend] { backend->abort(); }});
  }
}

TEST(EndOfABackend, AbortEndsKernelsThatWaitForARankThatIsGone) {
  const auto kernels = std::make_shared<Kernels>();
  const auto group = communicator_of(
      c10::make_intrusive<SpinningBackend>("nccl", kernels), "nccl:dp");
  EXPECT_TRUE(group->is_stream_ordered());
  const WorkPtr work = group->all_reduce(at::full({2}, 1.0), ReduceOp::kSum);
  EXPECT_TRUE(work->order_stream());
  EXPECT_FALSE(work->done());
  group->abort();
  group->abort();
  EXPECT_TRUE(kernels->end_after(1, std::chrono::seconds(10)));
  EXPECT_TRUE(work->done());
  EXPECT_EQ(kernels->num_aborts, 1);
  EXPECT_NE(error_of([&] { work->order_stream(); }).find("aborted"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              group->all_reduce(at::full({2}, 1.0), ReduceOp::kSum);
            }).find("aborted"),
            std::string::npos);
}

// One after the other the first would wait for the kernels of the second.
TEST(EndOfABackend, GroupsEndTogether) {
  const auto kernels = std::make_shared<Kernels>();
  const auto first =
      c10::make_intrusive<SpinningBackend>("nccl", kernels, /*needed=*/2);
  const auto second =
      c10::make_intrusive<SpinningBackend>("nccl", kernels, /*needed=*/2);
  std::vector<CommunicatorPtr> groups = {communicator_of(first, "a"),
                                         communicator_of(second, "b")};
  for (const CommunicatorPtr& group : groups) group->abort();
  groups.clear();  // waits for the end
  EXPECT_TRUE(first->has_ended);
  EXPECT_TRUE(second->has_ended);
}

TEST(EndOfABackend, GlooEndsItsWaitsOnly) {
  const auto kernels = std::make_shared<Kernels>();
  const auto group = communicator_of(
      c10::make_intrusive<SpinningBackend>("gloo", kernels), "gloo:dp");
  EXPECT_FALSE(group->is_stream_ordered());
  group->abort();
  EXPECT_FALSE(kernels->end_after(1, milliseconds(100)));
}

}  // namespace
}  // namespace smp::comm
