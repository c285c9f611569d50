// Tests communicators over a backend of c10d that is like that of NCCL.
#include "csrc/comm/c10d_communicator.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "csrc/comm/forwarding_communicator.h"
#include "csrc/common/check.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm {
namespace {

using C10dWork = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// Keeps no tensors, as NCCL's works do once a stream comes after them.
class OrderedWork final : public c10d::Work {
 public:
  bool isCompleted() override { return false; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

using Ends = std::vector<std::string>;

// Starts nothing, and notes its end.
class NotingBackend : public c10d::Backend {
 public:
  NotingBackend(std::string name, std::shared_ptr<Ends> ends)
      : Backend(0, 2), name_(std::move(name)), ends_(std::move(ends)) {}

  const std::string getBackendName() const override { return "nccl"; }
  C10dWork send(Tensors&, int, int) override { return work(); }
  C10dWork recv(Tensors&, int, int) override { return work(); }
  C10dWork broadcast(Tensors&, const c10d::BroadcastOptions&) override {
    return work();
  }
  C10dWork allreduce(Tensors&, const c10d::AllreduceOptions&) override {
    return work();
  }
  C10dWork _allgather_base(at::Tensor&, at::Tensor&,
                           const c10d::AllgatherOptions&) override {
    return work();
  }
  C10dWork _reduce_scatter_base(at::Tensor&, at::Tensor&,
                                const c10d::ReduceScatterOptions&) override {
    return work();
  }
  C10dWork alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&,
                         std::vector<int64_t>&,
                         const c10d::AllToAllOptions&) override {
    return work();
  }
  // Override those of Backend, which releases of torch before 2.7 do not have.
  void abort() { ends_->push_back("abort " + name_); }
  void shutdown() { ends_->push_back("shutdown " + name_); }

 private:
  static C10dWork work() { return c10::make_intrusive<OrderedWork>(); }

  const std::string name_;
  const std::shared_ptr<Ends> ends_;
};

CommunicatorPtr group_over(const std::string& name,
                           const std::shared_ptr<Ends>& ends) {
  const auto backend = c10::make_intrusive<NotingBackend>(name, ends);
  return make_c10d_communicator(backend, name,
                                {.end = [backend] { backend->abort(); }});
}

// ------------------------------------------------------- tensors of operations

using Begin = std::function<WorkPtr(Communicator&, at::Tensor part,
                                    const at::Tensor& whole)>;

struct Operation {
  const char* name;
  bool has_whole;
  Begin begin;
};

void PrintTo(const Operation& one, std::ostream* out) { *out << one.name; }

class KeptTensors : public testing::TestWithParam<Operation> {};

TEST_P(KeptTensors, live_as_long_as_the_work) {
  const auto group = group_over("dp", std::make_shared<Ends>());
  at::Tensor part = at::zeros({2});
  at::Tensor whole = at::zeros({4});
  const at::Storage part_memory = part.storage();
  const at::Storage whole_memory = whole.storage();
  WorkPtr work = GetParam().begin(*group, part, whole);
  EXPECT_TRUE(work->order_stream());
  part.reset();
  whole.reset();
  EXPECT_GT(part_memory.use_count(), 1) << "the device may still use it";
  EXPECT_EQ(whole_memory.use_count() > 1, GetParam().has_whole);
  work.reset();
  EXPECT_EQ(part_memory.use_count(), 1);
  EXPECT_EQ(whole_memory.use_count(), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Operations, KeptTensors,
    testing::Values(
        Operation{
            "send", false,
            [](auto& on, auto part, auto&) { return on.send(part, 1, 0); }},
        Operation{
            "recv", false,
            [](auto& on, auto part, auto&) { return on.recv(part, 1, 0); }},
        Operation{"all_reduce", false,
                  [](auto& on, auto part, auto&) {
                    return on.all_reduce(part, ReduceOp::kSum);
                  }},
        Operation{
            "broadcast", false,
            [](auto& on, auto part, auto&) { return on.broadcast(part, 0); }},
        Operation{"all_gather", true,
                  [](auto& on, auto part, auto& whole) {
                    return on.all_gather(whole, part);
                  }},
        Operation{"reduce_scatter", true,
                  [](auto& on, auto part, auto& whole) {
                    return on.reduce_scatter(part, whole, ReduceOp::kSum);
                  }},
        Operation{"all_to_all_v", true, [](auto& on, auto part, auto& whole) {
                    return on.all_to_all_v(part, whole, {1, 1}, {2, 2});
                  }}));

// --------------------------------------------------------------- the clean end

template <typename Backend = c10d::Backend>
constexpr bool kShutsDown = requires(Backend& any) { any.shutdown(); };

TEST(CleanEnd, groups_end_one_after_the_other) {
  if (!kShutsDown<>) GTEST_SKIP() << "this release of torch shuts nothing down";
  const auto ends = std::make_shared<Ends>();
  std::vector<CommunicatorPtr> groups;
  for (const char* name : {"dp", "tp", "rdp"}) {
    groups.push_back(
        std::make_shared<ForwardingCommunicator>(group_over(name, ends)));
  }
  for (const CommunicatorPtr& group : groups) group->shut_down();
  const Ends expected = {"shutdown dp", "shutdown tp", "shutdown rdp"};
  EXPECT_EQ(*ends, expected);
  for (const CommunicatorPtr& group : groups) {
    group->shut_down();
    group->abort();
    EXPECT_THROW(group->all_reduce(at::zeros({1}), ReduceOp::kSum), Error);
  }
  groups.clear();
  EXPECT_EQ(*ends, expected) << "it has ended already";
}

TEST(CleanEnd, a_group_that_was_aborted_stays_so) {
  const auto ends = std::make_shared<Ends>();
  CommunicatorPtr group = group_over("dp", ends);
  group->abort();
  group->shut_down();
  group.reset();
  EXPECT_EQ(*ends, Ends{"abort dp"});
}

class FailingBackend final : public NotingBackend {
 public:
  FailingBackend() : NotingBackend("dp", std::make_shared<Ends>()) {}
  void abort() { TORCH_CHECK(false, "the device is lost"); }
  void shutdown() { TORCH_CHECK(false, "the device is lost"); }
};

TEST(CleanEnd, a_device_that_has_failed_does_not_end_the_process) {
  for (const bool is_aborted : {true, false}) {
    if (!is_aborted && !kShutsDown<>) continue;
    const auto backend = c10::make_intrusive<FailingBackend>();
    CommunicatorPtr group = make_c10d_communicator(
        backend, "dp", {.end = [backend] { backend->abort(); }});
    testing::internal::CaptureStderr();
    is_aborted ? group->abort() : group->shut_down();
    group.reset();
    EXPECT_NE(testing::internal::GetCapturedStderr().find(
                  "the end of a group failed: the device is lost"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace smp::comm
