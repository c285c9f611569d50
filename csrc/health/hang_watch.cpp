#include "csrc/health/hang_watch.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "csrc/health/process_words.h"

namespace smp::health {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

// Silence after which a rank counts as stopped or cut off.
constexpr milliseconds kSilent{5000};
constexpr milliseconds kStacksTimeout{3000};
// Limits of the stacks in an error; the report before it has the whole stacks.
constexpr int kErrorFrames = 6;
constexpr int kErrorLines = 48;
// Number of checks of the script's stack in the time before a report.
constexpr int kLooks = 30;
// Number of looks that have to show the same stack before a rank is stuck. On a
// busy machine one look may take a second, and a function that calls itself
// shows the same stack by chance.
constexpr int kSameLooks = 10;

// Returns the frames of the script, empty if they are unknown. The line number
// of the innermost frame is left out, because a loop without calls changes it
// for ever.
std::string script_of(const std::string& stacks) {
  if (!stacks.starts_with("Thread of the script")) return {};
  std::string script = stacks.substr(0, stacks.find("\n\n"));
  const size_t line = script.find(", line ");
  const size_t name = script.find(" in ", std::min(line, script.size()));
  if (name != std::string::npos) script.erase(line, name - line);
  return script;
}

bool waits(const LivenessFrame& status) {
  return status.is_blocked || status.device_waits;
}

}  // namespace

void HangWatch::on_status(int global_rank, const LivenessFrame& status,
                          Clock::time_point now) {
  const auto [entry, is_new] = ranks_.try_emplace(global_rank);
  Rank& rank = entry->second;
  const bool turns = is_new || waits(status) != waits(rank.status);
  if (turns || status.progress != rank.status.progress) {
    rank.changed_at = now;
    rank.script.clear();
    rank.script_moved_at.reset();
    rank.num_same_looks = 0;
    rank.answered_at = now;
  }
  // The rank may have done work meanwhile that was not what it waits for.
  if (turns) rank.waits_since = now - milliseconds(status.blocked_ms);
  rank.status = status;
  rank.status_at = now;
}

void HangWatch::on_stacks(int global_rank, const std::string& stacks,
                          Clock::time_point now) {
  if (stacks_asked_at_) stacks_[global_rank] = stacks;
  const auto entry = ranks_.find(global_rank);
  if (entry == ranks_.end()) return;
  Rank& rank = entry->second;
  rank.is_asked = false;
  rank.answered_at = now;
  const std::string script = script_of(stacks);
  if (script.empty() || script == rank.script) {
    ++rank.num_same_looks;
    return;
  }
  // The stack may be cut off on a busy machine, which shows nothing.
  if (!script.starts_with(rank.script) && !rank.script.starts_with(script)) {
    rank.script_moved_at = now;
    rank.num_same_looks = 0;
  }
  rank.script = script;
}

void HangWatch::on_gone(int global_rank) { ranks_[global_rank].is_gone = true; }

void HangWatch::on_pause(Clock::duration pause) {
  for (auto& [number, rank] : ranks_) {
    rank.status_at += pause;
    rank.changed_at += pause;
    rank.answered_at += pause;
    rank.waits_since += pause;
    if (rank.script_moved_at) *rank.script_moved_at += pause;
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
    // A silent rank may have waited for long before it was stopped.
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
  reported_at_ = stacks_asked_at_ = looked_at_ = now;
  reported_ = found->lasts;
  stacks_.clear();
  std::string text = "nothing has moved for " + seconds_text(found->lasts) +
                     " (SMP_HANG_S); a rank that does not wait may hang:";
  for (const auto& [number, rank] : ranks_) {
    text += "\n  global_rank " + std::to_string(number) + describe(number, now);
  }
  return text + end_text(*found, now);
}

std::string HangWatch::end_text(const Standstill& found,
                                Clock::time_point now) const {
  if (!raises_ || found.stuck.empty()) return "";
  for (const int number : found.stuck) {
    if (!is_busy(number, now)) continue;
    return "\nthe run goes on, because the Python stack of global_rank " +
           std::to_string(number) + " changes; SMP_TIMEOUT_S ends it";
  }
  if (found.lasts >= 2 * after_) return "";
  return "\nthe run ends when this has lasted " + seconds_text(2 * after_) +
         " and the Python stack of no such rank changes "
         "(SMP_HANG_ACTION=report: it does not)";
}

bool HangWatch::is_busy(int global_rank, Clock::time_point now) const {
  const auto& moved_at = ranks_.at(global_rank).script_moved_at;
  return moved_at && now - *moved_at < after_;
}

bool HangWatch::is_seen_stuck(int global_rank, Clock::time_point now) const {
  const Rank& rank = ranks_.at(global_rank);
  if (is_busy(global_rank, now)) return false;
  const bool answers = now - rank.status_at <= kSilent &&
                       now - rank.answered_at < std::max(after_, kSilent);
  return !answers || rank.num_same_looks >= kSameLooks;
}

std::vector<int> HangWatch::due_looks(Clock::time_point now) {
  const std::optional<Standstill> found = standstill(now);
  if (!raises_ || !found || found->lasts < after_ || !reported_at_ ||
      now - looked_at_ < after_ / kLooks) {
    return {};
  }
  looked_at_ = now;
  std::vector<int> asked;
  for (const int number : found->stuck) {
    // A rank that has not answered yet is not asked a second time.
    if (std::exchange(ranks_.at(number).is_asked, true)) continue;
    asked.push_back(number);
  }
  return asked;
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
  return text + ": DOES NOT WAIT" + since +
         (is_busy(global_rank, now) ? ", but its Python stack changes; "
                                    : "; ") +
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

std::optional<HangWatch::StuckRanks> HangWatch::due_fault(
    Clock::time_point now) const {
  if (!raises_ || stacks_asked_at_ || reported_ < 2 * after_) {
    return std::nullopt;
  }
  const std::optional<Standstill> found = standstill(now);
  if (!found || !found->is_heard || found->stuck.empty() ||
      found->lasts < 2 * after_ ||
      !std::all_of(
          found->stuck.begin(), found->stuck.end(),
          [&](int number) { return is_seen_stuck(number, now); })) {
    return std::nullopt;
  }
  StuckRanks stuck{.global_ranks = found->stuck, .text = {}};
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
