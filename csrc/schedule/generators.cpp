#include "csrc/schedule/generators.h"

#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/schedule/policy.h"

namespace smp::schedule {
namespace {

void check_sizes(int num_ranks, int num_microbatches, int num_chunks) {
  SMP_CHECK_VALUE(num_ranks >= 1 && num_microbatches >= 1 && num_chunks >= 1,
                  "a schedule needs at least one rank, microbatch and chunk; "
                  "got ",
                  num_ranks, ", ", num_microbatches, " and ", num_chunks);
}

Action forward(int mb) { return {Phase::kForward, mb, 0}; }
Action backward(int mb) { return {Phase::kBackward, mb, 0}; }
Action weight(int mb) { return {Phase::kWeight, mb, 0}; }

}  // namespace

Schedule plan_fill_drain(int num_ranks, int num_microbatches) {
  check_sizes(num_ranks, num_microbatches, 1);
  ActionList actions;
  for (int mb = 0; mb < num_microbatches; ++mb) actions.push_back(forward(mb));
  for (int mb = 0; mb < num_microbatches; ++mb) actions.push_back(backward(mb));
  return Schedule(static_cast<size_t>(num_ranks), actions);
}

Schedule plan_1f1b(int num_ranks, int num_microbatches) {
  check_sizes(num_ranks, num_microbatches, 1);
  Schedule schedule;
  for (int i = 0; i < num_ranks; ++i) {
    ActionList actions;
    const int num_warmup = std::min(num_microbatches, num_ranks - 1 - i);
    int f = 0;
    int b = 0;
    while (f < num_warmup) actions.push_back(forward(f++));
    while (f < num_microbatches) {
      actions.push_back(forward(f++));
      actions.push_back(backward(b++));
    }
    while (b < num_microbatches) actions.push_back(backward(b++));
    schedule.push_back(std::move(actions));
  }
  return schedule;
}

Schedule plan_virtual_stages(int num_ranks, int num_microbatches,
                             int num_chunks) {
  check_sizes(num_ranks, num_microbatches, num_chunks);
  SMP_CHECK_VALUE(num_microbatches % num_ranks == 0,
                  "virtual stages need a number of microbatches (",
                  num_microbatches, ") that is a multiple of the ranks (",
                  num_ranks, "); the policy 'virtual_interleaved' takes any");
  // Units are (microbatch, chunk), in groups of one microbatch per rank.
  const int group = num_ranks * num_chunks;
  const int num_units = num_microbatches * num_chunks;
  const auto unit = [&](Phase phase, int u) -> Action {
    const int chunk = u % group / num_ranks;
    return {phase, u / group * num_ranks + u % num_ranks,
            phase == Phase::kForward ? chunk : num_chunks - 1 - chunk};
  };
  Schedule schedule;
  for (int i = 0; i < num_ranks; ++i) {
    ActionList actions;
    const int num_warmup =
        std::min(num_units, virtual_warmup(num_ranks, num_chunks, i));
    int f = 0;
    int b = 0;
    while (f < num_warmup) actions.push_back(unit(Phase::kForward, f++));
    while (f < num_units) {
      actions.push_back(unit(Phase::kForward, f++));
      actions.push_back(unit(Phase::kBackward, b++));
    }
    while (b < num_units) actions.push_back(unit(Phase::kBackward, b++));
    schedule.push_back(std::move(actions));
  }
  return schedule;
}

Schedule plan_zero_bubble(int num_ranks, int num_microbatches) {
  check_sizes(num_ranks, num_microbatches, 1);
  Schedule schedule;
  for (int i = 0; i < num_ranks; ++i) {
    ActionList actions;
    const int num_warmup = std::min(num_microbatches, num_ranks - 1 - i);
    int f = 0;
    int b = 0;
    int w = 0;
    while (f < num_warmup) actions.push_back(forward(f++));
    while (f < num_microbatches) {
      actions.push_back(forward(f++));
      actions.push_back(backward(b++));
      while (b - w > i) actions.push_back(weight(w++));
    }
    while (b < num_microbatches) {
      actions.push_back(backward(b++));
      actions.push_back(weight(w++));
    }
    while (w < num_microbatches) actions.push_back(weight(w++));
    schedule.push_back(std::move(actions));
  }
  return schedule;
}

Schedule make_plan(const std::string& name, int num_ranks, int num_microbatches,
                   int num_chunks) {
  if (name == "virtual_interleaved") {
    return plan_virtual_stages(num_ranks, num_microbatches, num_chunks);
  }
  make_policy(name);  // raises for a name that is none
  SMP_CHECK_VALUE(num_chunks == 1, "schedule '", name,
                  "' has one chunk per rank, got ", num_chunks,
                  "; use 'virtual_interleaved' for more");
  if (name == "simple") return plan_fill_drain(num_ranks, num_microbatches);
  if (name == "interleaved") return plan_1f1b(num_ranks, num_microbatches);
  return plan_zero_bubble(num_ranks, num_microbatches);
}

}  // namespace smp::schedule
