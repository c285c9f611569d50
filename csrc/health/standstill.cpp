#include "csrc/health/standstill.h"

#include <algorithm>

namespace smp::health {

using std::chrono::milliseconds;

std::optional<Standstill> find_standstill(const std::vector<RankState>& ranks) {
  Standstill found;
  milliseconds waits_for = milliseconds(-1);
  milliseconds workers_unmoved = milliseconds::max();
  milliseconds waiters_unmoved = milliseconds::max();
  for (const RankState& rank : ranks) {
    if (rank.has_left) continue;
    if (rank.waits) waits_for = std::max(waits_for, rank.waits_for);
    if (rank.waits && !rank.is_silent) {
      found.is_heard = true;
      waiters_unmoved = std::min(waiters_unmoved, rank.unmoved_for);
    } else {
      workers_unmoved = std::min(workers_unmoved, rank.unmoved_for);
      found.stuck.push_back(rank.global_rank);
    }
  }
  if (waits_for < milliseconds(0)) return std::nullopt;
  // Ranks that wait may still find things to do, for instance tasks that a
  // schedule has held back. Only ranks that do not wait count, if there are
  // any.
  const milliseconds unmoved =
      found.stuck.empty() ? waiters_unmoved : workers_unmoved;
  found.lasts = std::min(waits_for, unmoved);
  std::sort(found.stuck.begin(), found.stuck.end());
  return found;
}

}  // namespace smp::health
