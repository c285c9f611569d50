#include "csrc/health/wait_registry.h"

#include <utility>

namespace smp::health {

WaitRegistry::Snapshot WaitRegistry::snapshot() const {
  Snapshot result;
  result.progress = progress_.load(std::memory_order_relaxed);
  result.num_unsent = num_unsent_.load();
  result.device_waits = device_waits_;
  std::lock_guard lock(mutex_);
  result.activity = activity_;
  if (entries_.empty()) return result;
  for (const auto& count : sources_) result.progress += count();
  const Entry& newest = entries_.rbegin()->second;
  result.is_blocked = true;
  result.what = newest.what;
  result.collective = newest.collective;
  result.blocked_for = std::chrono::duration_cast<std::chrono::milliseconds>(
      Clock::now() - newest.since);
  return result;
}

void WaitRegistry::set_activity(std::string text) {
  std::lock_guard lock(mutex_);
  if (entries_.empty() && text != activity_) add_progress();
  activity_ = std::move(text);
}

void WaitRegistry::add_source(std::function<int64_t()> count) {
  std::lock_guard lock(mutex_);
  sources_.push_back(std::move(count));
}

BlockedScope::BlockedScope(WaitRegistry& registry, const std::string& what,
                           std::optional<CollectiveId> collective)
    : registry_(registry), collective_(std::move(collective)) {
  update(true, what);
}

BlockedScope::~BlockedScope() { update(false, {}); }

void BlockedScope::update(bool is_blocked, const std::string& what,
                          bool goes_on) {
  if (!is_blocked && id_ < 0) return;
  std::lock_guard lock(registry_.mutex_);
  auto& entries = registry_.entries_;
  if (!is_blocked) {
    entries.erase(id_);
    id_ = -1;
    registry_.add_progress();
  } else if (id_ < 0) {
    id_ = registry_.next_id_++;
    if (!goes_on || since_ == WaitRegistry::Clock::time_point()) {
      since_ = WaitRegistry::Clock::now();
    }
    entries.emplace(id_, WaitRegistry::Entry{what, since_, collective_});
  } else {
    entries.at(id_).what = what;
  }
}

}  // namespace smp::health
