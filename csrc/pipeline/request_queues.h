#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace smp::pipeline {

/// A request at its owner, from its arrival to its end.
struct Service {
  int caller_rank = -1;
  int64_t caller_context = 0;
  int64_t request_id = 0;
  /// Adds the service to the scheduler.
  std::function<void()> make_ready;
  std::string where;  ///< for errors: module, microbatch, phase
  /// Number of tensors still to come, plus one while the request is read.
  int num_missing = 1;
};

/// Runs the requests of one caller context one after the other, in the order in
/// which they were issued. This is a program order, so no circle of waiting can
/// arise. Neither arrival nor speed changes what a stateful module sees or the
/// order in which gradients add up. Thread-safe.
class RequestQueues {
 public:
  void add(std::shared_ptr<Service> service);
  /// Notes that the service needs one more tensor.
  void expect(Service& service);
  /// Notes that a missing tensor is here (or that the request is read).
  void arrived(const std::shared_ptr<Service>& service);
  /// Ends a service. @return its request id when nothing of its caller context
  /// is left
  std::optional<int64_t> finish(const Service& service);
  void clear();
  int64_t size() const;
  /// Returns a text about what the first request of each caller context waits
  /// for.
  std::string describe() const;

 private:
  using Key = std::pair<int, int64_t>;  // caller's rank and context

  // Returns the head of a queue if all it needs is here, else null.
  std::shared_ptr<Service> ready_head_locked(const Key& key);

  mutable std::mutex mutex_;
  std::map<Key, std::deque<std::shared_ptr<Service>>> queues_;
};

}  // namespace smp::pipeline
