#include "csrc/schedule/in_flight.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace smp::schedule {

bool is_beyond_1f1b(const ReadyTask& forward, const StepProgress& progress) {
  if (progress.active_microbatches == 0) return false;
  // The driver alone keeps a number of active microbatches below the number of
  // ranks: the ranks behind it have nothing to save.
  const int limit = std::max(
      1, std::max(progress.active_microbatches, progress.num_partitions) -
             progress.depth);
  std::set<std::pair<int64_t, int64_t>> held;
  for (const Action& action : progress.begun) {
    if (action.mb >= forward.key.mb) continue;
    if (action.phase == Phase::kForward) held.insert({action.mb, action.chunk});
    if (action.phase == Phase::kBackward &&
        std::ranges::find(progress.going_back, action.mb) ==
            progress.going_back.end()) {
      held.erase({action.mb, action.chunk});
    }
  }
  int num_held = 0;
  int64_t last = -1;
  for (const auto& [mb, chunk] : held) {
    if (mb == last) continue;  // counts once, however many chunks it has here
    last = mb;
    if (std::ranges::find(progress.ended, mb) == progress.ended.end()) {
      ++num_held;
    }
  }
  return num_held >= limit;
}

bool has_backwards_to_come(const StepProgress& progress) {
  if (progress.active_microbatches == 0) return false;
  std::set<int64_t> seen(progress.ended.begin(), progress.ended.end());
  for (const Action& action : progress.begun) {
    if (action.phase == Phase::kBackward) seen.insert(action.mb);
  }
  return static_cast<int>(seen.size()) < progress.num_microbatches;
}

int64_t num_open_units_before(int64_t mb, int64_t chunk, int64_t group,
                              const StepProgress& progress) {
  const auto order = [&](int64_t mb, int64_t chunk) {
    return std::tuple(mb / group, chunk, mb);
  };
  const auto unit = order(mb, chunk);
  std::set<std::pair<int64_t, int64_t>> done;
  const auto add = [&](int64_t mb, int64_t chunk) {
    if (order(mb, chunk) < unit) done.insert({mb, chunk});
  };
  for (const Action& action : progress.begun) {
    if (action.phase == Phase::kBackward) add(action.mb, action.chunk);
  }
  for (const int64_t ended : progress.ended) {
    for (int64_t c = 0; c < progress.num_chunks; ++c) add(ended, c);
  }
  const int64_t begin = mb / group * group;  // of the group of `mb`
  const int64_t size =
      std::min<int64_t>(group, progress.num_microbatches - begin);
  return begin * progress.num_chunks + chunk * size + (mb - begin) -
         static_cast<int64_t>(done.size());
}

}  // namespace smp::schedule
