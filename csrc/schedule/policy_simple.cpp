#include <tuple>

#include "csrc/schedule/policy.h"

namespace smp::schedule {
namespace {

// Runs all forwards, then all backwards (GPipe). A backward waits while the
// driver still has forwards to do among the microbatches that may be in flight.
// With fewer active microbatches than microbatches, the end of a microbatch
// lets in another, whose forward runs first.
class SimplePolicy final : public Policy {
 public:
  const std::string& name() const override {
    static const std::string text = "simple";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress& progress) const override {
    std::optional<size_t> best;
    for (size_t i = 0; i < ready.size(); ++i) {
      if (ready[i].key.phase == Phase::kBackward &&
          !may_begin_backward(progress)) {
        continue;
      }
      if (!best || rank(ready[i]) < rank(ready[*best])) best = i;
    }
    return best;
  }

  bool may_begin_backward(const StepProgress& progress) const override {
    return progress.num_forwards_pending == 0;
  }

  int default_active_microbatches(int, int num_microbatches) const override {
    return num_microbatches;
  }

  bool limits_forwards(bool) const override { return false; }

 private:
  static std::tuple<bool, int64_t, int64_t> rank(const ReadyTask& task) {
    return {task.key.phase != Phase::kForward, task.key.mb, task.arrival};
  }
};

const RegisterPolicy<SimplePolicy> registered_simple;

}  // namespace

}  // namespace smp::schedule
