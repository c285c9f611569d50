#include "csrc/schedule/simulator_checks.h"

#include <algorithm>
#include <set>
#include <string>

#include "csrc/common/check.h"

namespace smp::schedule {
namespace {

// The limit is far above any step, far below the range of nanoseconds in 64
// bits.
constexpr double kMaxMs = 1e6;

void check_ms(double ms, const std::string& what) {
  SMP_CHECK_VALUE(ms >= 0 && ms <= kMaxMs, what, " must be between 0 and ",
                  kMaxMs, " ms, got ", ms);
}

void check_bytes(int64_t num_bytes, const std::string& what) {
  SMP_CHECK_VALUE(num_bytes >= 0, what, " must not be negative, got ",
                  num_bytes);
}

void check_stage(const StageCost& stage, size_t idx, size_t num_ranks) {
  const std::string prefix = "stage " + std::to_string(idx) + ": ";
  SMP_CHECK_VALUE(
      stage.rank >= 0 && static_cast<size_t>(stage.rank) < num_ranks, prefix,
      "rank must be between 0 and ", num_ranks - 1, ", got ", stage.rank);
  check_ms(stage.forward_ms, prefix + "forward_ms");
  check_ms(stage.backward_ms, prefix + "backward_ms");
  check_ms(stage.weight_ms, prefix + "weight_ms");
  check_bytes(stage.activation_bytes, prefix + "activation_bytes");
}

void check_boundary(const BoundaryCost& boundary, size_t idx) {
  const std::string prefix = "boundary " + std::to_string(idx) + ": ";
  check_bytes(boundary.forward_bytes, prefix + "forward_bytes");
  check_bytes(boundary.backward_bytes, prefix + "backward_bytes");
  check_ms(boundary.latency_ms, prefix + "latency_ms");
  check_ms(boundary.ms_per_byte, prefix + "ms_per_byte");
  const auto num_bytes = static_cast<double>(
      std::max(boundary.forward_bytes, boundary.backward_bytes));
  check_ms(boundary.ms_per_byte * num_bytes, prefix + "the transfer");
}

void check_list(const ActionList& actions, size_t rank, int64_t num_chunks,
                int64_t num_microbatches) {
  const std::string prefix = "the list of rank " + std::to_string(rank);
  for (const Action& action : actions) {
    SMP_CHECK_VALUE(action.mb >= 0 && action.mb < num_microbatches, prefix,
                    " has ", to_string(action), ", but there are ",
                    num_microbatches, " microbatches");
    SMP_CHECK_VALUE(action.chunk >= 0 && action.chunk < num_chunks, prefix,
                    " has ", to_string(action), ", but the rank has ",
                    num_chunks, num_chunks == 1 ? " stage" : " stages");
  }
  const std::set<Action> listed(actions.begin(), actions.end());
  for (int64_t mb = 0; mb < num_microbatches; ++mb) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
        const Action action{phase, mb, chunk};
        SMP_CHECK_VALUE(listed.contains(action), prefix, " lacks ",
                        to_string(action),
                        "; each forward and backward has to be there");
      }
    }
  }
}

}  // namespace

size_t num_ranks(const SimulationInput& input) {
  const auto num_stages = static_cast<int>(input.stages.size());
  int largest = -1;
  for (const StageCost& stage : input.stages) {
    SMP_CHECK_VALUE(
        stage.rank >= 0 && stage.rank < num_stages, "the ranks of ", num_stages,
        " stages are counted from 0 without gaps, got rank ", stage.rank);
    largest = std::max(largest, stage.rank);
  }
  return static_cast<size_t>(largest + 1);
}

void check_input(const SimulationInput& input, size_t num_ranks) {
  const size_t num_stages = input.stages.size();
  SMP_CHECK_VALUE(num_stages > 0, "a simulation needs at least one stage");
  SMP_CHECK_VALUE(input.num_microbatches >= 1,
                  "num_microbatches must be 1 or more, got ",
                  input.num_microbatches);
  SMP_CHECK_VALUE(input.active_microbatches >= 0,
                  "active_microbatches must be 1 or more, or 0 for the default "
                  "of the policy; got ",
                  input.active_microbatches);
  SMP_CHECK_VALUE(
      input.boundaries.empty() || input.boundaries.size() == num_stages - 1,
      num_stages, " stages have ", num_stages - 1, " boundaries, got ",
      input.boundaries.size());
  std::set<int> used;
  for (size_t i = 0; i < num_stages; ++i) {
    check_stage(input.stages[i], i, num_ranks);
    used.insert(input.stages[i].rank);
  }
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    SMP_CHECK_VALUE(used.contains(static_cast<int>(rank)), "rank ", rank,
                    " of ", num_ranks,
                    " has no stage; count ranks without "
                    "gaps");
  }
  for (size_t i = 0; i < input.boundaries.size(); ++i) {
    check_boundary(input.boundaries[i], i);
  }
}

void check_lists(const SimulationInput& input, const Schedule& schedule) {
  for (size_t rank = 0; rank < schedule.size(); ++rank) {
    const auto num_chunks = std::ranges::count(
        input.stages, static_cast<int>(rank), &StageCost::rank);
    check_list(schedule[rank], rank, num_chunks, input.num_microbatches);
  }
}

}  // namespace smp::schedule
