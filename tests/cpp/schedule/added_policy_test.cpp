// A policy that the library does not have: all that CONTRIBUTING.md asks for is
// in this file, and the sweeps of this folder run over it too.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "csrc/common/check.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/simulator.h"
#include "tests/cpp/schedule/chains.h"

namespace smp::schedule {
namespace {

// A microbatch is over before the next one begins.
class OneByOnePolicy final : public Policy {
 public:
  const std::string& name() const override {
    static const std::string text = "one_by_one";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress&) const override {
    const auto age = [](const ReadyTask& task) {
      return std::tuple(task.key.mb, task.arrival);
    };
    if (ready.empty()) return std::nullopt;
    return std::ranges::min_element(ready, {}, age) - ready.begin();
  }

  int default_active_microbatches(int, int) const override { return 1; }
};

const RegisterPolicy<OneByOnePolicy> registered;

TEST(AddedPolicy, is_known_by_its_name) {
  const auto names = policy_names();
  EXPECT_TRUE(std::ranges::count(names, "one_by_one") == 1);
  EXPECT_TRUE(std::ranges::is_sorted(names));
  EXPECT_EQ(make_policy("one_by_one")->name(), "one_by_one");
  EXPECT_THROW(register_policy([]() -> PolicyPtr {
                 return std::make_unique<OneByOnePolicy>();
               }),
               InternalError);
}

TEST(AddedPolicy, answers_all_questions_without_being_asked_for_its_name) {
  const PolicyPtr policy = make_policy("one_by_one");
  EXPECT_EQ(policy->default_chunks(), 1);
  EXPECT_EQ(policy->kept_microbatches({3, 1, 8}, 1, 2), 1);
  EXPECT_FALSE(policy->splits_backward(0, 0));
  EXPECT_TRUE(policy->may_begin_backward({.num_forwards_pending = 1}));
  EXPECT_TRUE(policy->limits_forwards(false));
}

TEST(AddedPolicy, has_a_plan_and_runs_it) {
  const Schedule plan = make_plan("one_by_one", {2, 1, 2});
  EXPECT_EQ(to_string(plan), "0: F0 B0 F1 B1\n1: F0 B0 F1 B1\n");
  const auto result = simulate(equal_chain(2, 2, 0), "one_by_one");
  EXPECT_EQ(result.executed, plan);
  EXPECT_EQ(result.ranks[0].peak_activations, 1);
}

}  // namespace
}  // namespace smp::schedule
