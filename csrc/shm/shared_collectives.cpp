#include "csrc/shm/shared_collectives.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/comm/communicator_checks.h"
#include "csrc/comm/forwarding_communicator.h"
#include "csrc/comm/next_stamps.h"
#include "csrc/common/check.h"
#include "csrc/shm/collective_memory.h"
#include "csrc/shm/shared_collectives_setup.h"
#include "csrc/shm/shared_operation.h"

namespace smp::shm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// An operation that has begun. Guarded by the mutex of the queue.
struct Entry {
  explicit Entry(SharedOperationPtr operation)
      : operation(std::move(operation)) {}

  enum class State { kBegin, kWritten, kCombined };

  const SharedOperationPtr operation;
  State state = State::kBegin;
  int64_t chunk = 0;
  bool is_done = false;
  bool is_aborted = false;
  std::string disagreement = {};
  comm::OtherCall other = {};
};

using EntryPtr = std::shared_ptr<Entry>;

// The operations of one rank, in order. Threads that wait advance them; one
// thread at a time, the driver, sleeps until other ranks arrive.
class Queue {
 public:
  explicit Queue(std::unique_ptr<CollectiveMemory> memory)
      : memory_(std::move(memory)) {}

  EntryPtr add(SharedOperationPtr operation) {
    auto entry = std::make_shared<Entry>(std::move(operation));
    std::lock_guard lock(mutex_);
    SMP_CHECK(!is_aborted_, entry->operation->call.text(), ": aborted");
    entries_.push_back(entry);
    if (!has_driver_) run();  // the others may go on without waiting for us
    return entry;
  }

  bool is_done(const Entry& entry) {
    std::lock_guard lock(mutex_);
    if (!has_driver_ && !is_aborted_) run();
    return entry.is_done || entry.is_aborted;
  }

  void wait(Entry& entry, milliseconds timeout) {
    const Clock::time_point deadline =
        Clock::now() +
        std::min<milliseconds>(timeout, std::chrono::hours(9999));
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!has_driver_ && !is_aborted_) run();
      if (entry.is_done || entry.is_aborted) break;
      const bool is_late = Clock::now() >= deadline;
      SMP_CHECK(!is_late, entry.operation->call.text(), ": timed out after ",
                timeout.count(), " ms");
      if (has_driver_) {
        changed_.wait_until(lock, deadline);
      } else {
        drive(lock, deadline);
      }
    }
    SMP_CHECK(entry.is_done, entry.operation->call.text(), ": aborted");
    if (entry.disagreement.empty()) return;
    throw comm::Disagreement(
        detail::concat(rank_prefix(), entry.operation->call.text(), ": ",
                       entry.disagreement),
        entry.other);
  }

  void abort(Entry& entry) {
    {
      std::lock_guard lock(mutex_);
      if (entry.is_done) return;
      entry.is_aborted = true;
    }
    wake();
  }

  void abort() {
    {
      std::lock_guard lock(mutex_);
      is_aborted_ = true;
      for (const EntryPtr& entry : entries_) entry->is_aborted = true;
      if (!has_driver_) entries_.clear();
    }
    wake();
  }

 private:
  void wake() {
    memory_->ring_own_bell();
    changed_.notify_all();
  }

  void drive(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
    has_driver_ = true;
    lock.unlock();
    memory_->sleep_until_arrival(deadline);
    lock.lock();
    has_driver_ = false;
    changed_.notify_all();
  }

  // Advances operations until data of another rank are missing.
  void run() {
    while (!entries_.empty()) {
      Entry& entry = *entries_.front();
      if (!step(entry)) return;
      if (!entry.is_done) continue;
      entries_.pop_front();
      changed_.notify_all();
    }
  }

  // @return false when other ranks have to arrive first
  bool step(Entry& entry) {
    SharedOperation& operation = *entry.operation;
    switch (entry.state) {
      case Entry::State::kBegin:
        if (entry.chunk == 0) memory_->begin(operation.stamp);
        memory_->begin_chunk();
        operation.write(*memory_, entry.chunk);
        memory_->arrive();
        entry.state = Entry::State::kWritten;
        return true;
      case Entry::State::kWritten:
        if (!memory_->have_arrived()) return false;
        if (entry.chunk == 0 && disagrees(entry)) return true;
        if (!operation.combines()) return finish_chunk(entry);
        operation.combine(*memory_, entry.chunk);
        memory_->arrive();
        entry.state = Entry::State::kCombined;
        return true;
      case Entry::State::kCombined:
        if (!memory_->have_arrived()) return false;
        return finish_chunk(entry);
    }
    return false;
  }

  bool finish_chunk(Entry& entry) {
    entry.operation->read(*memory_, entry.chunk);
    entry.state = Entry::State::kBegin;
    entry.is_done = ++entry.chunk == entry.operation->num_chunks();
    return true;
  }

  bool disagrees(Entry& entry) {
    const int other = memory_->find_disagreement();
    if (other < 0) {
      const std::string words = entry.operation->disagreement(*memory_);
      if (words.empty()) return false;
      entry.disagreement = "the ranks disagree; " + words;
      entry.is_done = true;
      return true;
    }
    entry.disagreement = detail::concat(
        "the ranks disagree; group rank ", memory_->group_rank(), " calls ",
        describe_stamp(entry.operation->stamp), ", group rank ", other,
        " calls ", describe_stamp(memory_->stamp_of(other)));
    entry.other = {other, memory_->stamp_of(other).stamp};
    entry.is_done = true;
    return true;
  }

  const std::unique_ptr<CollectiveMemory> memory_;  // the driver's, if any
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<EntryPtr> entries_;
  bool has_driver_ = false;
  bool is_aborted_ = false;
};

class QueuedWork final : public comm::Work {
 public:
  QueuedWork(std::shared_ptr<Queue> queue, EntryPtr entry)
      : queue_(std::move(queue)), entry_(std::move(entry)) {}

  bool done() override { return queue_->is_done(*entry_); }
  void wait(milliseconds timeout) override { queue_->wait(*entry_, timeout); }
  void abort() override { queue_->abort(*entry_); }

 private:
  const std::shared_ptr<Queue> queue_;
  const EntryPtr entry_;
};

class SharedCommunicator final : public comm::ForwardingCommunicator {
 public:
  SharedCommunicator(comm::CommunicatorPtr inner,
                     std::unique_ptr<CollectiveMemory> memory)
      : ForwardingCommunicator(std::move(inner)),
        info_(std::make_shared<comm::GroupInfo>(comm::GroupInfo{
            inner_->name(), inner_->group_rank(), inner_->size()})),
        queue_(std::make_shared<Queue>(std::move(memory))) {}

  comm::WorkPtr all_reduce(at::Tensor tensor, comm::ReduceOp op) override {
    comm::CallName call{info_, "all_reduce"};
    comm::check_reducible(tensor, call);
    comm::check_cpu_tensor(tensor, call);
    return add(
        make_all_reduce(std::move(call), stamps_.take(), tensor.detach(), op));
  }

  comm::WorkPtr broadcast(at::Tensor tensor, int root) override {
    comm::CallName call{info_, "broadcast", "root", root};
    comm::check_root(call);
    comm::check_cpu_tensor(tensor, call);
    return add(
        make_broadcast(std::move(call), stamps_.take(), tensor.detach()));
  }

  comm::WorkPtr all_gather(at::Tensor output,
                           const at::Tensor& input) override {
    comm::CallName call{info_, "all_gather"};
    comm::check_parts(output, input, call);
    comm::check_cpu_tensor(input, call);
    return add(make_all_gather(std::move(call), stamps_.take(), output.detach(),
                               input.detach()));
  }

  comm::WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                               comm::ReduceOp op) override {
    comm::CallName call{info_, "reduce_scatter"};
    comm::check_reducible(input, call);
    comm::check_parts(input, output, call);
    comm::check_cpu_tensor(input, call);
    return add(make_reduce_scatter(std::move(call), stamps_.take(),
                                   output.detach(), input.detach(), op));
  }

  comm::WorkPtr all_to_all(at::Tensor output,
                           const at::Tensor& input) override {
    comm::CallName call{info_, "all_to_all"};
    comm::check_exchange(output, input, call);
    comm::check_cpu_tensor(input, call);
    return add(make_all_to_all(std::move(call), stamps_.take(), output.detach(),
                               input.detach()));
  }

  comm::WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                             const comm::Counts& output_counts,
                             const comm::Counts& input_counts) override {
    comm::CallName call{info_, "all_to_all_v"};
    comm::check_counts(output, input, output_counts, input_counts, call);
    comm::check_cpu_tensor(input, call);
    return add(make_all_to_all_v(std::move(call), stamps_.take(),
                                 output.detach(), input.detach(), output_counts,
                                 input_counts));
  }

  comm::WorkPtr barrier() override {
    return add(make_shared_barrier({info_, "barrier"}, stamps_.take()));
  }

  bool stamp_next(uint64_t stamp) override {
    stamps_.set(stamp);
    return true;
  }

  bool goes_on_alone() const override { return false; }

  void abort() override {
    queue_->abort();
    inner_->abort();
  }

 private:
  comm::WorkPtr add(SharedOperationPtr operation) {
    return std::make_shared<QueuedWork>(queue_,
                                        queue_->add(std::move(operation)));
  }

  const std::shared_ptr<const comm::GroupInfo> info_;
  const std::shared_ptr<Queue> queue_;
  comm::NextStamps stamps_;
};

}  // namespace

comm::CommunicatorPtr make_shared_communicator(
    comm::CommunicatorPtr inner, std::vector<std::shared_ptr<uint8_t>> areas) {
  const int group_rank = inner->group_rank();
  return std::make_shared<SharedCommunicator>(
      std::move(inner),
      std::make_unique<CollectiveMemory>(std::move(areas), group_rank));
}

}  // namespace smp::shm
