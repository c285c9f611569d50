#include "csrc/health/wait_watch.h"

#include <utility>

namespace smp::health {

WaitWatch::~WaitWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

WaitWatch::Scope::Scope(WaitWatch& watch, Clock::time_point deadline,
                        std::function<void()> wake)
    : watch_(watch), wake_(std::move(wake)) {
  std::lock_guard lock(watch_.mutex_);
  // The thread would never see a deadline that it has already passed.
  const bool is_over = deadline <= watch_.served_until_;
  entry_ = watch_.scopes_.emplace(deadline, this);
  if (watch_.aborted_ || is_over) {
    wake_();
    return;
  }
  if (deadline == Clock::time_point::max()) return;  // only abort ends it
  if (!watch_.thread_.joinable()) {
    watch_.thread_ = std::thread([&watch] { watch.run(); });
  } else if (deadline < watch_.next_look_) {
    watch_.changed_.notify_all();
  }
}

WaitWatch::Scope::~Scope() {
  std::lock_guard lock(watch_.mutex_);
  watch_.scopes_.erase(entry_);
}

void WaitWatch::abort() {
  std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  for (const auto& [deadline, scope] : scopes_) scope->wake_();
}

void WaitWatch::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Clock::time_point now = Clock::now();
    auto entry = scopes_.upper_bound(served_until_);
    for (; entry != scopes_.end() && entry->first <= now; ++entry) {
      entry->second->wake_();
    }
    served_until_ = now;
    // Waits an hour at most: waits until time_point::max() overflow in the
    // library.
    const Clock::time_point latest = now + std::chrono::hours(1);
    next_look_ =
        entry == scopes_.end() || entry->first > latest ? latest : entry->first;
    changed_.wait_until(lock, next_look_);
  }
}

}  // namespace smp::health
