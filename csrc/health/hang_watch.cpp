#include "csrc/health/hang_watch.h"

#include <algorithm>
#include <sstream>

#include "csrc/health/process_words.h"

namespace smp::health {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

// A rank that has said nothing for so long is stopped or cut off.
constexpr milliseconds kSilent{5000};
constexpr milliseconds kStacksTimeout{3000};
// Of a stack in an error; the whole stacks are in the report before it.
constexpr int kErrorFrames = 6;
constexpr int kErrorLines = 48;

bool waits(const LivenessFrame& status) {
  return status.is_blocked || status.device_waits;
}

}  // namespace

void HangWatch::on_status(int global_rank, const LivenessFrame& status,
                          Clock::time_point now) {
  const auto [entry, is_new] = ranks_.try_emplace(global_rank);
  Rank& rank = entry->second;
  const bool turns = is_new || waits(status) != waits(rank.status);
  if (turns || status.progress != rank.status.progress) rank.changed_at = now;
  if (turns) rank.waits_since = now;
  rank.status = status;
  rank.status_at = now;
}

void HangWatch::on_stacks(int global_rank, const std::string& stacks) {
  if (stacks_asked_at_) stacks_[global_rank] = stacks;
}

void HangWatch::on_gone(int global_rank) { ranks_[global_rank].is_gone = true; }

void HangWatch::on_pause(Clock::duration pause) {
  for (auto& [number, rank] : ranks_) {
    rank.status_at += pause;
    rank.changed_at += pause;
    rank.waits_since += pause;
  }
  if (reported_at_) *reported_at_ += pause;
  if (stacks_asked_at_) *stacks_asked_at_ += pause;
}

std::optional<Standstill> HangWatch::standstill(Clock::time_point now) const {
  if (after_ == milliseconds(0) ||
      ranks_.size() < static_cast<size_t>(world_size_)) {
    return std::nullopt;
  }
  std::vector<RankState> states;
  for (const auto& [number, rank] : ranks_) {
    const bool is_silent = now - rank.status_at > kSilent;
    // A rank that waited until it was stopped may have waited for long.
    const Clock::time_point moved_at =
        is_silent && waits(rank.status) ? rank.status_at : rank.changed_at;
    states.push_back(
        {.global_rank = number,
         .has_left = rank.is_gone,
         .waits = waits(rank.status),
         .is_silent = is_silent,
         .waits_for = duration_cast<milliseconds>(now - rank.waits_since),
         .unmoved_for = duration_cast<milliseconds>(now - moved_at)});
  }
  return find_standstill(states);
}

std::optional<std::string> HangWatch::due_report(Clock::time_point now) {
  const std::optional<Standstill> found = standstill(now);
  if (!found || found->lasts < after_ ||
      (reported_at_ && now - *reported_at_ < after_) ||
      (stacks_asked_at_ && now - *stacks_asked_at_ < 2 * kStacksTimeout)) {
    return std::nullopt;  // the last stacks are still coming
  }
  reported_at_ = stacks_asked_at_ = now;
  reported_ = found->lasts;
  stacks_.clear();
  std::string text = "nothing has moved for " + seconds_text(found->lasts) +
                     " (SMP_HANG_S); a rank that does not wait may hang:";
  for (const auto& [number, rank] : ranks_) {
    text += "\n  global_rank " + std::to_string(number) + describe(number, now);
  }
  if (raises_ && !found->stuck.empty() && found->lasts < 2 * after_) {
    text += "\nthe run ends when this has lasted " + seconds_text(2 * after_) +
            " (SMP_HANG_ACTION=report: it does not)";
  }
  return text;
}

std::string HangWatch::describe(int global_rank, Clock::time_point now) const {
  const Rank& rank = ranks_.at(global_rank);
  if (rank.is_gone) return ": has left";
  const LivenessFrame& status = rank.status;
  std::string text = status.where.empty() ? "" : " (" + status.where + ")";
  if (now - rank.status_at > kSilent) {
    const auto pid = pids_.find(global_rank);
    std::string state = pid == pids_.end() ? "" : process_words(pid->second);
    text += " HAS SAID NOTHING for " + seconds_text(now - rank.status_at) +
            " (" + (state.empty() ? "stopped, or cut off" : state) +
            "); before that";
  }
  const std::string since = " since " + seconds_text(now - rank.changed_at);
  if (status.is_blocked) return text + ": waits in " + status.text + since;
  if (status.device_waits) {
    return text + ": its device waits" + since + " in a collective; " +
           (status.text.empty() ? "outside of step functions" : status.text);
  }
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

std::optional<HangWatch::Stuck> HangWatch::due_fault(
    Clock::time_point now) const {
  if (!raises_ || stacks_asked_at_ || reported_ < 2 * after_) {
    return std::nullopt;
  }
  const std::optional<Standstill> found = standstill(now);
  if (!found || !found->is_heard || found->stuck.empty() ||
      found->lasts < 2 * after_) {
    return std::nullopt;
  }
  Stuck stuck{.global_ranks = found->stuck, .text = {}};
  stuck.text = "it has neither waited nor moved for " +
               seconds_text(found->lasts) +
               " while other ranks waited (SMP_HANG_S, SMP_HANG_ACTION)";
  for (const int number : found->stuck) {
    const auto stack = stacks_.find(number);
    const bool has_stack = stack != stacks_.end() && !stack->second.empty();
    stuck.text +=
        "\n  global_rank " + std::to_string(number) + describe(number, now) +
        "\n" +
        (has_stack ? innermost_lines(stack->second) : "  (it gives no stack)");
  }
  return stuck;
}

std::string innermost_lines(const std::string& stacks) {
  std::istringstream lines(stacks);
  std::string text;
  int num_lines = 0;
  int num_frames = 0;
  for (std::string line; std::getline(lines, line);) {
    const bool is_frame = line.starts_with("  ");
    num_frames = is_frame ? num_frames + 1 : 0;
    if (line.empty() || num_frames > kErrorFrames) continue;
    if (num_lines++ == kErrorLines) return text + "\n  ...";
    if (!text.empty()) text += "\n";
    text += "  " + line;
  }
  return text;
}

}  // namespace smp::health
