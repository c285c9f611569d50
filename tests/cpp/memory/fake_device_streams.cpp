#include "tests/cpp/memory/fake_device_streams.h"

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/common/monotonic_clock.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::fake_device {
namespace {

struct Event {
  int64_t recorded = 0;            // how often, as asked
  std::atomic<int64_t> fired = 0;  // how often, as done
  std::atomic<int64_t> fired_ns = 0;
};
using EventPtr = std::shared_ptr<Event>;

struct Asked {
  std::function<bool()> may_begin;  // empty: always
  std::function<void()> work;
};

struct Queue {
  std::deque<Asked> asked;
  bool is_running = false;  // one thread at a time
};

std::atomic<bool> streams_are_lazy{false};
std::mutex clock_mutex;
std::function<int64_t()> the_clock;

int64_t clock_ns() {
  const std::lock_guard lock(clock_mutex);
  return the_clock ? the_clock() : monotonic_ns();
}

std::mutex queues_mutex;
std::map<uint64_t, std::pair<c10::Stream, Queue>> queues;

Queue& queue_of(const c10::Stream& stream) {
  const auto [entry, is_new] =
      queues.try_emplace(stream.hash(), stream, Queue{});
  return entry->second.second;
}

void add(const c10::Stream& stream, Asked asked) {
  const std::lock_guard lock(queues_mutex);
  queue_of(stream).asked.push_back(std::move(asked));
}

EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

// Runs the first thing, unless it has to wait or another thread is at it.
bool run_one(const c10::Stream& stream) {
  std::unique_lock lock(queues_mutex);
  Queue& queue = queue_of(stream);
  if (queue.is_running || queue.asked.empty()) return false;
  const Asked& first = queue.asked.front();
  if (first.may_begin && !first.may_begin()) return false;
  const Asked taken = std::move(queue.asked.front());
  queue.asked.pop_front();
  queue.is_running = true;
  lock.unlock();
  if (taken.work) taken.work();
  lock.lock();
  queue.is_running = false;
  return true;
}

std::vector<c10::Stream> all_streams() {
  const std::lock_guard lock(queues_mutex);
  std::vector<c10::Stream> streams;
  for (const auto& [hash, entry] : queues) streams.push_back(entry.first);
  return streams;
}

}  // namespace

void set_clock(std::function<int64_t()> clock) {
  const std::lock_guard lock(clock_mutex);
  the_clock = std::move(clock);
}

void set_lazy(bool lazy) { streams_are_lazy = lazy; }

void ask(const c10::Stream& stream, std::function<void()> work) {
  if (!streams_are_lazy) return work();
  add(stream, {{}, std::move(work)});
}

bool is_empty(const c10::Stream& stream) {
  const std::lock_guard lock(queues_mutex);
  const Queue& queue = queue_of(stream);
  return queue.asked.empty() && !queue.is_running;
}

int run(const c10::Stream& stream, int most) {
  int num_done = 0;
  while (num_done < most && run_one(stream)) ++num_done;
  return num_done;
}

void run_all(bool copies_first) {
  bool has_moved = true;
  while (has_moved) {
    has_moved = false;
    std::vector<c10::Stream> streams = all_streams();
    if (copies_first) streams = {streams.rbegin(), streams.rend()};
    for (const c10::Stream& stream : streams) has_moved |= run(stream) > 0;
  }
}

// ------------------------------------------------------------------- events

void record_event(void** event, const c10::Stream& stream) {
  if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
  const EventPtr recorded = event_of(*event);
  const int64_t version = ++recorded->recorded;
  ask(stream, [recorded, version] {
    recorded->fired_ns = clock_ns();
    recorded->fired = version;
  });
}

void wait_for_event(void* event, const c10::Stream& stream) {
  if (event == nullptr || !streams_are_lazy) return;
  const EventPtr awaited = event_of(event);
  const int64_t version = awaited->recorded;
  add(stream, {[awaited, version] { return awaited->fired >= version; }, {}});
}

bool is_fired(void* event) {
  if (event == nullptr) return true;
  return event_of(event)->fired >= event_of(event)->recorded;
}

int64_t fired_ns(void* event) { return event_of(event)->fired_ns; }

void drop_event(void* event) { delete static_cast<EventPtr*>(event); }

}  // namespace smp::fake_device
