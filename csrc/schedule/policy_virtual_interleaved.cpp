#include <algorithm>
#include <tuple>

#include "csrc/common/check.h"
#include "csrc/schedule/in_flight.h"
#include "csrc/schedule/policy.h"

namespace smp::schedule {
namespace {

// Returns the number of forwards that rank `depth` does before its first
// backward.
int num_warmup(int num_partitions, int num_chunks, int depth) {
  if (num_chunks == 1) return num_partitions - 1 - depth;
  return (num_chunks - 1) * num_partitions + 2 * (num_partitions - 1 - depth);
}

// 1F1B over virtual stages (arXiv:2104.04473, section 2.2.2) as a rule instead
// of a list: units are (microbatch, chunk) in groups of one microbatch per
// rank, and each group passes chunk after chunk. A forward runs while fewer
// earlier units are open than 1F1B keeps on this rank, otherwise a backward.
class VirtualInterleavedPolicy final : public Policy {
 public:
  const std::string& name() const override {
    static const std::string text = "virtual_interleaved";
    return text;
  }

  std::optional<size_t> pick(const std::vector<ReadyTask>& ready,
                             const StepProgress& progress) const override {
    // Later forwards see at least as many earlier units: if the first one has
    // to wait, all have to.
    const auto forward = first(ready, progress, /*is_forward=*/true);
    if (forward && !must_wait(ready[*forward], progress)) return forward;
    return first(ready, progress, /*is_forward=*/false);
  }

  int default_active_microbatches(int num_partitions,
                                  int num_microbatches) const override {
    return std::min(num_microbatches, 2 * num_partitions);
  }

  int default_chunks() const override { return 2; }

  // Counts parts of microbatches, rounded up.
  int kept_microbatches(const PipelineSize& size, int active_microbatches,
                        int depth) const override {
    const int num_units =
        1 + num_warmup(size.num_partitions, size.num_chunks, depth);
    return std::min(active_microbatches,
                    (num_units + size.num_chunks - 1) / size.num_chunks);
  }

  // Returns the list of the article. Beyond 4 ranks it waits for a forward
  // where `pick` runs a backward that is ready, in the same time.
  Schedule plan(const PipelineSize& size) const override {
    SMP_CHECK_VALUE(size.num_microbatches % size.num_partitions == 0,
                    "virtual stages need a number of microbatches (",
                    size.num_microbatches,
                    ") that is a multiple of the ranks (", size.num_partitions,
                    "); the policy '", name(), "' takes any");
    Schedule schedule;
    for (int depth = 0; depth < size.num_partitions; ++depth) {
      schedule.push_back(list_of(size, depth));
    }
    return schedule;
  }

 private:
  static ActionList list_of(const PipelineSize& size, int depth) {
    const auto [p, v, m] = size;
    // In groups of one microbatch per rank.
    const auto unit = [p, v](Phase phase, int u) -> Action {
      const int chunk = u % (p * v) / p;
      return {phase, u / (p * v) * p + u % p,
              phase == Phase::kForward ? chunk : v - 1 - chunk};
    };
    ActionList actions;
    int f = 0;
    int b = 0;
    while (f < std::min(m * v, num_warmup(p, v, depth))) {
      actions.push_back(unit(Phase::kForward, f++));
    }
    while (f < m * v) {
      actions.push_back(unit(Phase::kForward, f++));
      actions.push_back(unit(Phase::kBackward, b++));
    }
    while (b < m * v) actions.push_back(unit(Phase::kBackward, b++));
    return actions;
  }

  static bool must_wait(const ReadyTask& task, const StepProgress& progress) {
    if (progress.active_microbatches == 0) return false;
    const int limit = 1 + num_warmup(progress.num_partitions,
                                     progress.num_chunks, progress.depth);
    return num_open_units_before(task.key.mb, task.chunk,
                                 progress.num_partitions, progress) >= limit;
  }

  // Returns the first task in the order of units; backward meets the chunks in
  // reverse.
  static std::optional<size_t> first(const std::vector<ReadyTask>& ready,
                                     const StepProgress& progress,
                                     bool is_forward) {
    const auto place = [&](size_t i) {
      const ReadyTask& task = ready[i];
      return std::tuple(task.key.mb / progress.num_partitions,
                        is_forward ? task.chunk : -task.chunk, task.key.mb,
                        task.arrival);
    };
    std::optional<size_t> best;
    for (size_t i = 0; i < ready.size(); ++i) {
      if ((ready[i].key.phase == Phase::kForward) != is_forward) continue;
      if (!best || place(i) < place(*best)) best = i;
    }
    return best;
  }
};

const RegisterPolicy<VirtualInterleavedPolicy> registered_virtual_interleaved;

}  // namespace

}  // namespace smp::schedule
