#include "csrc/health/fault_board.h"

#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/common/log.h"

namespace smp::health {

std::string Fault::describe() const {
  if (kind == Kind::kDeadlock) return "deadlock: " + text;
  std::string who = "a rank (which one is not known)";
  if (global_rank >= 0) {
    who = "global_rank " + std::to_string(global_rank);
    if (!coordinates.empty()) who += " (" + coordinates + ")";
  }
  switch (kind) {
    case Kind::kDied:
      if (!text.empty()) return who + " died or its connection broke: " + text;
      return who +
             " died: its connection closed without a goodbye (killed or "
             "crashed)";
    case Kind::kUnreachable:
      return who + ": its host cannot be reached: " + text;
    case Kind::kLeft:
      return who + " has left (its script has finished)" +
             (text.empty() ? "" : " " + text);
    case Kind::kStuck:
      return who + " is stuck: " + text;
    default:
      return who + " raised" + (where.empty() ? "" : " in " + where) + ": " +
             text;
  }
}

std::string Fault::headline() const {
  const std::string text = describe();
  return text.substr(0, text.find('\n'));
}

FaultBoard::FaultBoard(int global_rank) : global_rank_(global_rank) {}

void FaultBoard::set_coordinates(std::vector<std::string> per_global_rank) {
  std::lock_guard lock(mutex_);
  coordinates_ = std::move(per_global_rank);
}

void FaultBoard::set_addresses(std::vector<std::string> per_global_rank) {
  std::lock_guard lock(mutex_);
  addresses_ = std::move(per_global_rank);
}

int FaultBoard::rank_at(const std::string& address) const {
  std::lock_guard lock(mutex_);
  const auto found = std::find(addresses_.begin(), addresses_.end(), address);
  return address.empty() || found == addresses_.end()
             ? -1
             : static_cast<int>(found - addresses_.begin());
}

std::string FaultBoard::coordinates(int global_rank) const {
  std::lock_guard lock(mutex_);
  return coordinates_locked(global_rank);
}

std::string FaultBoard::coordinates_locked(int global_rank) const {
  if (global_rank < 0) return {};
  const auto index = static_cast<size_t>(global_rank);
  return index < coordinates_.size() ? coordinates_[index] : std::string();
}

bool FaultBoard::report(Fault fault) {
  std::string line;
  {
    std::lock_guard lock(mutex_);
    if (fault_) return false;
    if (fault.coordinates.empty()) {
      fault.coordinates = coordinates_locked(fault.global_rank);
    }
    // A rank that raised prints its error itself. Launchers see neither
    // deadlocks nor stuck ranks. A wait raises the fault of a left rank it
    // needs.
    const bool is_silent = fault.kind == Fault::Kind::kDied ||
                           fault.kind == Fault::Kind::kUnreachable ||
                           fault.kind == Fault::Kind::kLeft;
    const bool is_first = global_rank_ == (fault.global_rank == 0 ? 1 : 0);
    if (is_silent && is_first && !fault.is_found_here) line = fault.headline();
    fault_ = std::move(fault);
    reported_at_ = std::chrono::steady_clock::now();
  }
  if (!line.empty()) log_line(LogLevel::kError, line);
  wake_all();
  return true;
}

void FaultBoard::mark_left(int global_rank, CollectiveLog::State entered) {
  if (goodbyes_.add(global_rank, std::move(entered))) wake_all();
}

void FaultBoard::mark_left(const RankSet& ranks) {
  if (goodbyes_.add(ranks)) wake_all();
}

void FaultBoard::hold(std::vector<int> needed,
                      std::chrono::milliseconds limit) {
  std::lock_guard lock(mutex_);
  hold_ = Hold{.needed = std::move(needed), .limit = limit};
}

void FaultBoard::release() {
  bool has_hidden = false;
  {
    std::lock_guard lock(mutex_);
    has_hidden = is_hidden_locked();
    hold_.reset();
  }
  if (has_hidden) wake_all();
}

bool FaultBoard::is_hidden_locked() const {
  if (!fault_ || !hold_) return false;
  const int culprit = fault_->global_rank;
  if (culprit < 0 || culprit == global_rank_) return false;
  const auto& needed = hold_->needed;
  if (std::find(needed.begin(), needed.end(), culprit) != needed.end()) {
    return false;
  }
  return std::chrono::steady_clock::now() - reported_at_ < hold_->limit;
}

std::optional<Fault> FaultBoard::fault() const {
  std::lock_guard lock(mutex_);
  if (is_hidden_locked()) return std::nullopt;
  return fault_;
}

std::optional<Fault> FaultBoard::known_fault() const {
  std::lock_guard lock(mutex_);
  return fault_;
}

void FaultBoard::raise_if_faulted() const {
  const std::optional<Fault> found = fault();
  if (found) throw PeerFailure(rank_prefix() + found->describe());
}

int FaultBoard::subscribe(std::function<void()> wake) {
  std::lock_guard lock(subscribers_mutex_);
  subscribers_.emplace_back(next_token_, std::move(wake));
  return next_token_++;
}

void FaultBoard::unsubscribe(int token) {
  std::lock_guard lock(subscribers_mutex_);
  std::erase_if(subscribers_,
                [&](const auto& entry) { return entry.first == token; });
}

void FaultBoard::set_interrupt_check(std::function<void()> check) {
  interrupt_check_ = std::move(check);
}

void FaultBoard::check_interrupt() const {
  if (interrupt_check_) interrupt_check_();
}

void FaultBoard::wake_all() {
  std::lock_guard lock(subscribers_mutex_);
  for (const auto& [token, wake] : subscribers_) wake();
}

}  // namespace smp::health
