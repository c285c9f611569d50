#include "csrc/memory/offload_plan.h"

#include <gtest/gtest.h>

#include <map>

namespace smp::memory {
namespace {

ActivationTask forward(int mb, int idx) { return {false, {mb, idx}}; }
ActivationTask backward(int mb, int idx) { return {true, {mb, idx}}; }

std::vector<ActivationTask> one_microbatch(int num_layers) {
  std::vector<ActivationTask> tasks;
  for (int i = 0; i < num_layers; ++i) tasks.push_back(forward(0, i));
  for (int i = num_layers - 1; i >= 0; --i) tasks.push_back(backward(0, i));
  return tasks;
}

// One forward, one backward, with as many microbatches under way as `depth`.
std::vector<ActivationTask> pipelined(int num_layers, int num_mbs, int depth) {
  std::vector<ActivationTask> tasks;
  for (int t = 0; t < num_mbs + depth; ++t) {
    for (int i = 0; t < num_mbs && i < num_layers; ++i) {
      tasks.push_back(forward(t, i));
    }
    for (int i = num_layers - 1; t >= depth && i >= 0; --i) {
      tasks.push_back(backward(t - depth, i));
    }
  }
  return tasks;
}

TEST(OffloadPlan, what_is_needed_at_once_stays) {
  const auto plan = plan_offload(one_microbatch(6), 4);
  // 6 layers: the backward of layer i is 2 (5 - i) + 1 tasks behind.
  EXPECT_EQ(plan.stays,
            (std::vector<bool>{false, false, false, false, true, true, false,
                               false, false, false, false, false}));
}

TEST(OffloadPlan, each_comes_back_the_horizon_ahead) {
  const auto plan = plan_offload(one_microbatch(6), 4);
  std::map<int, size_t> begun;  // by layer
  for (size_t i = 0; i < plan.loads.size(); ++i) {
    for (const ActivationId& id : plan.loads[i]) begun[id.idx] = i;
  }
  // Backward of layer i is task 11 - i.
  EXPECT_EQ(begun, (std::map<int, size_t>{{0, 7}, {1, 6}, {2, 5}, {3, 4}}));
}

TEST(OffloadPlan, holds_in_pipelines_with_any_horizon) {
  for (const int horizon : {1, 2, 4, 7, 100}) {
    const auto tasks = pipelined(3, 6, 2);
    const auto plan = plan_offload(tasks, horizon);
    std::map<ActivationId, size_t> made;
    std::map<ActivationId, size_t> loaded;
    int num_stayed = 0;
    for (size_t i = 0; i < tasks.size(); ++i) {
      for (const ActivationId& id : plan.loads[i]) {
        EXPECT_TRUE(made.contains(id)) << "before it was made";
        EXPECT_TRUE(loaded.emplace(id, i).second) << "twice";
      }
      const ActivationTask& task = tasks[i];
      if (!task.is_backward) {
        made[task.id] = i;
        num_stayed += plan.stays[i];
        continue;
      }
      const bool stayed = plan.stays[made.at(task.id)];
      EXPECT_NE(stayed, loaded.contains(task.id));
      if (stayed) {
        EXPECT_LE(i - made[task.id], static_cast<size_t>(horizon));
      } else {
        EXPECT_EQ(i - loaded[task.id], static_cast<size_t>(horizon));
      }
    }
    EXPECT_EQ(num_stayed == 18, horizon == 100);
  }
}

TEST(OffloadPlan, forwards_without_backward_do_not_come_back) {
  const auto plan =
      plan_offload({forward(0, 0), forward(0, 1), backward(0, 1)}, 1);
  EXPECT_EQ(plan.stays, (std::vector<bool>{false, true, false}));
  for (const auto& loads : plan.loads) EXPECT_TRUE(loads.empty());
}

TEST(OffloadPlan, without_a_plan_microbatches_come_back_one_by_one) {
  const std::vector<ActivationId> live{{0, 0}, {1, 0}, {1, 1}, {2, 0}, {0, 1}};
  EXPECT_EQ(
      expected_order(live, 1),
      (std::vector<ActivationId>{{1, 1}, {1, 0}, {0, 1}, {0, 0}, {2, 0}}));
  EXPECT_EQ(expected_order(live, std::nullopt).front(), (ActivationId{0, 1}));
}

}  // namespace
}  // namespace smp::memory
