#include "csrc/health/hang_watch.h"

#include <algorithm>

namespace smp::health {
namespace {

using std::chrono::milliseconds;

// A rank that has said nothing for so long is stopped or cut off.
constexpr milliseconds kSilent{5000};
constexpr milliseconds kStacksTimeout{3000};

}  // namespace

void HangWatch::on_status(int global_rank, const LivenessFrame& status,
                          Clock::time_point now) {
  const auto [entry, is_new] = ranks_.try_emplace(global_rank);
  Rank& rank = entry->second;
  if (is_new || status.progress != rank.status.progress ||
      status.is_blocked != rank.status.is_blocked) {
    rank.changed_at = now;
  }
  rank.status = status;
  rank.status_at = now;
}

void HangWatch::on_stacks(int global_rank, const std::string& stacks) {
  if (stacks_asked_at_) stacks_[global_rank] = stacks;
}

void HangWatch::on_gone(int global_rank) { ranks_[global_rank].is_gone = true; }

std::optional<std::string> HangWatch::due_report(Clock::time_point now) {
  if (after_ == milliseconds(0) ||
      ranks_.size() < static_cast<size_t>(world_size_)) {
    return std::nullopt;
  }
  // Ranks that wait may still find things to do, for instance tasks that a
  // schedule has held back: what counts are ranks that do not
  // wait.
  Clock::time_point moved_at = Clock::time_point::min();
  Clock::time_point worked_at = Clock::time_point::min();
  bool somebody_waits = false;
  bool somebody_works = false;
  for (const auto& [number, rank] : ranks_) {
    if (rank.is_gone) continue;
    moved_at = std::max(moved_at, rank.changed_at);
    somebody_waits |= rank.status.is_blocked;
    if (!rank.status.is_blocked || now - rank.status_at > kSilent) {
      somebody_works = true;
      worked_at = std::max(worked_at, rank.changed_at);
    }
  }
  if (somebody_works) moved_at = worked_at;
  if (reported_at_) moved_at = std::max(moved_at, *reported_at_);
  if (!somebody_waits || now - moved_at < after_) return std::nullopt;
  reported_at_ = stacks_asked_at_ = now;
  stacks_.clear();
  std::string text = "nothing has moved for " + seconds_text(after_) +
                     " (SMP_HANG_S); a rank that does not wait may hang:";
  for (const auto& [number, rank] : ranks_) {
    text += "\n  global_rank " + std::to_string(number) + describe(rank, now);
  }
  return text;
}

std::string HangWatch::describe(const Rank& rank, Clock::time_point now) {
  if (rank.is_gone) return ": has left";
  const LivenessFrame& status = rank.status;
  std::string text = status.where.empty() ? "" : " (" + status.where + ")";
  if (now - rank.status_at > kSilent) {
    text += " HAS SAID NOTHING for " + seconds_text(now - rank.status_at) +
            " (stopped, or cut off); before that";
  }
  const std::string since = " since " + seconds_text(now - rank.changed_at);
  if (status.is_blocked) return text + ": waits in " + status.text + since;
  return text + ": DOES NOT WAIT" + since + "; " +
         (status.text.empty() ? "outside of step functions" : status.text);
}

std::optional<std::string> HangWatch::due_stacks(Clock::time_point now) {
  if (!stacks_asked_at_) return std::nullopt;
  const auto num_there =
      std::count_if(ranks_.begin(), ranks_.end(),
                    [](const auto& entry) { return !entry.second.is_gone; });
  if (stacks_.size() < static_cast<size_t>(num_there) &&
      now - *stacks_asked_at_ < kStacksTimeout) {
    return std::nullopt;
  }
  stacks_asked_at_.reset();
  std::string text = "Python stacks of all ranks:";
  for (const auto& [number, rank] : ranks_) {
    if (rank.is_gone) continue;
    const auto found = stacks_.find(number);
    const bool has_text = found != stacks_.end() && !found->second.empty();
    text += "\n---- global_rank " + std::to_string(number) + "\n" +
            (has_text ? found->second : "(it gives none)\n");
  }
  return text;
}

}  // namespace smp::health
