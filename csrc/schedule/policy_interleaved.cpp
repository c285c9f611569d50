#include <algorithm>
#include <tuple>

#include "csrc/schedule/in_flight.h"
#include "csrc/schedule/policy.h"

namespace smp::schedule {
namespace {

// Backward first, so that activations are freed early; then the oldest
// microbatch; then the order of arrival. A rank behind the driver keeps one
// microbatch less for each rank in front of it: with equal stages and as many
// active microbatches as ranks this is 1F1B, action by action.
class InterleavedPolicy final : public Policy {
 public:
  const std::string& name() const override {
    static const std::string text = "interleaved";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress& progress) const override {
    std::optional<size_t> best;
    for (size_t i = 0; i < ready.size(); ++i) {
      if (!best || rank(ready[i]) < rank(ready[*best])) best = i;
    }
    if (!best || ready[*best].key.phase != Phase::kForward) return best;
    // The oldest forward waits: then all of them would.
    return is_beyond_1f1b(ready[*best], progress) ? std::nullopt : best;
  }

  int default_active_microbatches(int num_partitions, int) const override {
    return num_partitions + 2;
  }

 private:
  static std::tuple<bool, int64_t, int64_t> rank(const ReadyTask& task) {
    return {task.key.phase != Phase::kBackward, task.key.mb, task.arrival};
  }
};

}  // namespace

std::unique_ptr<Policy> make_interleaved_policy() {
  return std::make_unique<InterleavedPolicy>();
}

}  // namespace smp::schedule
