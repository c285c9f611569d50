#include "csrc/health/goodbye_news.h"

#include <algorithm>
#include <utility>

namespace smp::health {

std::optional<GoodbyeNews::Clock::duration> GoodbyeNews::due_in(
    Clock::time_point now) const {
  if (untold_.is_empty()) return std::nullopt;
  if (!told_at_) return Clock::duration(0);
  return std::max<Clock::duration>(*told_at_ + kEvery - now,
                                   Clock::duration(0));
}

std::optional<RankSet> GoodbyeNews::due(Clock::time_point now, bool is_end) {
  const std::optional<Clock::duration> in = due_in(now);
  if (!in || (!is_end && *in > Clock::duration(0))) return std::nullopt;
  told_at_ = now;
  return std::exchange(untold_, RankSet());
}

}  // namespace smp::health
