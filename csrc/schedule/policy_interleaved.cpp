#include <algorithm>
#include <tuple>

#include "csrc/schedule/in_flight.h"
#include "csrc/schedule/policy.h"
#include "csrc/schedule/simulator.h"

namespace smp::schedule {
namespace {

// Runs backward first, so that activations are freed early; then the oldest
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
    // The oldest forward waits: then all forwards would wait.
    return is_beyond_1f1b(ready[*best], progress) ? std::nullopt : best;
  }

  int default_active_microbatches(int num_partitions, int) const override {
    return num_partitions + 2;
  }

  // Returns one less for each rank in front; see `is_beyond_1f1b`.
  int kept_microbatches(const PipelineSize& size, int active_microbatches,
                        int depth) const override {
    return std::min(active_microbatches,
                    std::max(active_microbatches, size.num_partitions) - depth);
  }

  // Without kept activations no limit is needed.
  bool limits_forwards(bool keeps_activations) const override {
    return keeps_activations;
  }

  // 1F1B (arXiv:2104.04473, section 2.2.1): with equal stages more active
  // microbatches than ranks cost memory and save no time.
  Schedule plan(const PipelineSize& size) const override {
    return executed_by_equal_stages(*this, size, size.num_partitions);
  }

 private:
  static std::tuple<bool, int64_t, int64_t> rank(const ReadyTask& task) {
    return {task.key.phase != Phase::kBackward, task.key.mb, task.arrival};
  }
};

const RegisterPolicy<InterleavedPolicy> registered_interleaved;

}  // namespace

}  // namespace smp::schedule
