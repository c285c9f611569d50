#include "csrc/pipeline/request_queues.h"

#include "csrc/common/check.h"

namespace smp::pipeline {

void RequestQueues::add(std::shared_ptr<Service> service) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Key key{service->caller_rank, service->caller_context};
  queues_[key].push_back(std::move(service));
}

void RequestQueues::expect(Service& service) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++service.num_missing;
}

std::shared_ptr<Service> RequestQueues::ready_head_locked(const Key& key) {
  const auto found = queues_.find(key);
  if (found == queues_.end() || found->second.empty()) return nullptr;
  std::shared_ptr<Service>& head = found->second.front();
  if (head->num_missing != 0) return nullptr;
  head->num_missing = -1;  // handed out
  return head;
}

void RequestQueues::arrived(const std::shared_ptr<Service>& service) {
  std::shared_ptr<Service> head;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --service->num_missing;
    head = ready_head_locked({service->caller_rank, service->caller_context});
  }
  if (head) head->make_ready();
}

std::optional<int64_t> RequestQueues::finish(const Service& service) {
  std::shared_ptr<Service> head;
  std::optional<int64_t> last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Key key{service.caller_rank, service.caller_context};
    const auto found = queues_.find(key);
    if (found == queues_.end()) return std::nullopt;  // the step was abandoned
    SMP_ASSERT(found->second.front()->request_id == service.request_id,
               "request ", service.request_id, " ended out of order");
    found->second.pop_front();
    if (found->second.empty()) {
      queues_.erase(found);
      last = service.request_id;
    } else {
      head = ready_head_locked(key);
    }
  }
  if (head) head->make_ready();
  return last;
}

void RequestQueues::clear() {
  decltype(queues_) dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(queues_);
}

int64_t RequestQueues::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t size = 0;
  for (const auto& [key, queue] : queues_) {
    size += static_cast<int64_t>(queue.size());
  }
  return size;
}

std::string RequestQueues::describe() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [key, queue] : queues_) {
    const Service& head = *queue.front();
    if (head.num_missing <= 0) continue;  // the scheduler describes it
    if (!text.empty()) text += "; ";
    text += head.where + ": waiting for " + std::to_string(head.num_missing) +
            " tensors";
  }
  return text;
}

}  // namespace smp::pipeline
