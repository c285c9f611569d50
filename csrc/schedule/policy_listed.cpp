#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "csrc/common/check.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/schedule_text.h"

namespace smp::schedule {
namespace {

class ListedPolicy final : public Policy {
 public:
  explicit ListedPolicy(ActionList actions) : actions_(std::move(actions)) {
    for (size_t i = 0; i < actions_.size(); ++i) {
      const Action& action = actions_[i];
      SMP_CHECK_VALUE(place_.emplace(action, i).second, "entry ", i + 1,
                      " of the schedule, ", to_string(action),
                      ", is there before; name each action once");
      SMP_CHECK_VALUE(
          action.phase != Phase::kWeight ||
              place_.contains({Phase::kBackward, action.mb, action.chunk}),
          "entry ", i + 1, " of the schedule, ", to_string(action),
          ", comes before the backward it is a part of");
    }
  }

  const std::string& name() const override {
    static const std::string text = "listed";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress& progress) const override {
    const size_t next = next_entry(progress);
    std::optional<size_t> best;
    for (size_t i = 0; i < ready.size(); ++i) {
      if (place(ready[i]) > next && place(ready[i]) < actions_.size()) continue;
      if (!best || rank(ready[i]) < rank(ready[*best])) best = i;
    }
    return best;
  }

  int default_active_microbatches(int, int num_microbatches) const override {
    return num_microbatches;
  }

  bool has_fixed_order() const override { return true; }

  bool splits_backward(int64_t mb, int64_t chunk) const override {
    return place_.contains({Phase::kWeight, mb, chunk});
  }

 private:
  // Returns the place in the list; the list's length for tasks it does not
  // name.
  size_t place(const ReadyTask& task) const {
    const auto it = place_.find(task.action());
    return it == place_.end() ? actions_.size() : it->second;
  }

  std::tuple<size_t, bool, int64_t, int64_t> rank(const ReadyTask& task) const {
    return {place(task), task.key.phase == Phase::kForward, task.key.mb,
            task.arrival};
  }

  size_t next_entry(const StepProgress& progress) const {
    const std::set<Action> begun(progress.begun.begin(), progress.begun.end());
    const std::set<int64_t> ended(progress.ended.begin(), progress.ended.end());
    size_t next = 0;
    while (next < actions_.size() && (begun.contains(actions_[next]) ||
                                      ended.contains(actions_[next].mb))) {
      ++next;
    }
    return next;
  }

  const ActionList actions_;
  std::map<Action, size_t> place_;
};

}  // namespace

std::unique_ptr<Policy> make_listed_policy(ActionList actions) {
  return std::make_unique<ListedPolicy>(std::move(actions));
}

}  // namespace smp::schedule
