#include "csrc/health/fault_aware_wait.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

// Replaces longer time-outs, whose sum with now() would overflow.
constexpr std::chrono::hours kLongest{24 * 365};

}  // namespace

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += " " + std::to_string(rank);
  return text;
}

FaultAwareWait::FaultAwareWait(FaultBoard& board, WaitSpec spec)
    : board_(board),
      spec_(std::move(spec)),
      deadline_(Clock::now() +
                std::min<std::chrono::milliseconds>(spec_.timeout, kLongest)),
      next_interrupt_check_(Clock::now() + kSlice),
      blocked_(board.waits()) {}

void FaultAwareWait::check(std::unique_lock<std::mutex>& lock) {
  if (Clock::now() >= next_interrupt_check_) {
    lock.unlock();
    try {
      board_.check_interrupt();
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
    next_interrupt_check_ = Clock::now() + kSlice;
  }
  const Clock::time_point now = Clock::now();
  if (!faulted_since_ && board_.fault()) faulted_since_ = now;
  if (faulted_since_ && now - *faulted_since_ >= kFaultGrace) {
    board_.raise_if_faulted();
  }
  std::vector<int> missing;
  if (spec_.missing) missing = spec_.missing();
  check_left(lock, missing, now);
  if (now >= deadline_) {
    const double timeout_s = static_cast<double>(spec_.timeout.count()) / 1e3;
    throw Error(detail::concat(rank_prefix(), "timed out after ", timeout_s,
                               " s in ", describe(missing),
                               spec_.hint.empty() ? "" : "; ", spec_.hint));
  }
  blocked_.update(true, describe(missing));
}

void FaultAwareWait::check_left(std::unique_lock<std::mutex>& lock,
                                const std::vector<int>& missing,
                                Clock::time_point now) {
  const auto left =
      std::find_if(missing.begin(), missing.end(),
                   [this](int rank) { return board_.has_left(rank); });
  if (left == missing.end()) {
    left_since_.reset();
    return;
  }
  if (!left_since_) left_since_ = now;
  if (now - *left_since_ < kLeftGrace) return;
  lock.unlock();
  try {
    fail_because_left(board_, *left, spec_.what);
  } catch (...) {
    lock.lock();
    throw;
  }
}

void fail_because_left(FaultBoard& board, int global_rank,
                       const std::string& what) {
  const Fault fault{.kind = Fault::Kind::kLeft,
                    .global_rank = global_rank,
                    .text = "while global_rank " +
                            std::to_string(board.global_rank()) +
                            " waits for it in " + what,
                    .coordinates = board.coordinates(global_rank),
                    .is_found_here = true};
  const std::string text = fault.describe();
  // Told to all ranks: otherwise they would take the end of this rank for the
  // first failure.
  board.report(fault);
  throw PeerFailure(rank_prefix() + text);
}

FaultAwareWait::Clock::time_point FaultAwareWait::next_look() const {
  Clock::time_point next =
      std::min({deadline_, next_interrupt_check_, Clock::now() + kSlice});
  if (left_since_) next = std::min(next, *left_since_ + kLeftGrace);
  if (faulted_since_) next = std::min(next, *faulted_since_ + kFaultGrace);
  return next;
}

std::string FaultAwareWait::describe(const std::vector<int>& missing) const {
  if (missing.empty()) return spec_.what;
  return spec_.what + ", waiting for global_rank" +
         (missing.size() > 1 ? "s" : "") + list_ranks(missing);
}

}  // namespace smp::health
