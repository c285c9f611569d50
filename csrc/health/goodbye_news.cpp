#include "csrc/health/goodbye_news.h"

#include <algorithm>
#include <utility>

namespace smp::health {

std::optional<GoodbyeNews::Clock::duration> GoodbyeNews::due_in(
    Clock::time_point now) const {
  if (unsent_.is_empty()) return std::nullopt;
  if (!sent_at_) return Clock::duration(0);
  return std::max<Clock::duration>(*sent_at_ + kEvery - now,
                                   Clock::duration(0));
}

std::optional<RankSet> GoodbyeNews::due(Clock::time_point now, bool is_end) {
  const std::optional<Clock::duration> in = due_in(now);
  if (!in || (!is_end && *in > Clock::duration(0))) return std::nullopt;
  sent_at_ = now;
  return std::exchange(unsent_, RankSet());
}

}  // namespace smp::health
