#include "csrc/memory/offload_plan.h"

#include <algorithm>
#include <map>

namespace smp::memory {

OffloadPlan plan_offload(const std::vector<ActivationTask>& tasks,
                         int horizon) {
  OffloadPlan plan;
  plan.stays.resize(tasks.size());
  plan.loads.resize(tasks.size());
  std::map<ActivationId, size_t> made;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const ActivationTask& task = tasks[i];
    if (!task.is_backward) {
      made[task.id] = i;
      continue;
    }
    const auto found = made.find(task.id);
    if (found == made.end()) continue;
    const size_t forward = found->second;
    made.erase(found);
    if (i - forward <= static_cast<size_t>(horizon)) {
      plan.stays[forward] = true;
    } else {
      plan.loads[i - horizon].push_back(task.id);
    }
  }
  return plan;
}

std::vector<ActivationId> expected_order(std::vector<ActivationId> live,
                                         std::optional<int> current) {
  std::sort(live.begin(), live.end(),
            [&](const ActivationId& a, const ActivationId& b) {
              const bool a_runs = current == a.mb;
              const bool b_runs = current == b.mb;
              if (a_runs != b_runs) return a_runs;
              return a.mb != b.mb ? a.mb < b.mb : a.idx > b.idx;
            });
  return live;
}

}  // namespace smp::memory
