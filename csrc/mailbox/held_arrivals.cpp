#include "csrc/mailbox/held_arrivals.h"

#include <exception>
#include <string>
#include <utility>

#include "csrc/health/thread_name.h"
#include "csrc/memory/device_scope.h"

namespace smp::mailbox {

HeldArrivals::HeldArrivals(const LinkOwner& owner, int world_size, Take take)
    : owner_(owner), take_(std::move(take)), sources_(world_size) {}

HeldArrivals::~HeldArrivals() { end(); }

bool HeldArrivals::hold(Message& message, bool must_wait) {
  {
    const std::lock_guard lock(mutex_);
    Source& source = sources_.at(message.source_rank);
    if (!must_wait && source.waiting.empty() && !source.is_cut) return false;
    if (is_ending_) {
      source.is_cut = true;
      return true;
    }
    source.waiting.push_back(std::move(message));
    ++num_held_;
    owner_.faults->waits().add_unsent(1);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
  return true;
}

int64_t HeldArrivals::num_held() const {
  const std::lock_guard lock(mutex_);
  return num_held_;
}

void HeldArrivals::run() {
  health::name_this_thread("smp-arrivals");
  memory::enter_device(owner_.device);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || num_held_ > 0; });
    for (Source& source : sources_) {
      if (is_ending_) return;
      deliver_first(lock, source);
    }
  }
}

// Delivers the first message of a source. It stays in the queue until its
// handler has run, so that later messages wait behind it.
void HeldArrivals::deliver_first(std::unique_lock<std::mutex>& lock,
                                 Source& source) {
  if (source.waiting.empty()) return;
  Message message = std::move(source.waiting.front());
  lock.unlock();
  if (take(message) && !is_ending_) owner_.deliver(std::move(message));
  message = {};  // frees tensors without the lock
  lock.lock();
  if (is_ending_) return;  // `begin_end` has counted it
  source.waiting.pop_front();
  --num_held_;
  owner_.faults->waits().add_progress();
  owner_.faults->waits().add_unsent(-1);
}

bool HeldArrivals::take(Message& message) {
  try {
    take_(message);
    return true;
  } catch (const std::exception& error) {
    // A `take` ends because its lane ends.
    if (is_ending_) return false;
    owner_.faults->report({.kind = health::Fault::Kind::kRaised,
                           .global_rank = owner_.global_rank,
                           .where = "a tensor of a message from global_rank " +
                                    std::to_string(message.source_rank),
                           .text = error.what()});
    return false;
  }
}

void HeldArrivals::begin_end() {
  {
    const std::lock_guard lock(mutex_);
    if (is_ending_.exchange(true)) return;
    for (Source& source : sources_) source.is_cut = !source.waiting.empty();
    owner_.faults->waits().add_unsent(-std::exchange(num_held_, 0));
  }
  changed_.notify_all();
}

void HeldArrivals::end() {
  begin_end();
  if (!thread_.joinable()) return;
  thread_.join();
  for (Source& source : sources_) source.waiting.clear();
}

}  // namespace smp::mailbox
