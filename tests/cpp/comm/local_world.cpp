#include "tests/cpp/comm/local_world.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "csrc/comm/communicator_checks.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

enum class LocalKind {
  kSend,
  kRecv,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllToAllV,
  kBarrier
};

// One call of one rank. Guarded by World::mutex, except for what is set before
// the operation is shared.
struct Operation {
  Operation(LocalKind kind, CallName call)
      : kind(kind), call(std::move(call)) {}

  const LocalKind kind;
  const CallName call;
  at::Tensor input;   // collectives
  at::Tensor output;  // receives and collectives; may be the input
  ReduceOp op = ReduceOp::kSum;
  uint64_t stamp = 0;
  Counts sent;  // all_to_all_v
  Counts received;

  bool done = false;
  std::string error;  // empty: success
  bool disagreement = false;
  OtherCall other;  // with another stamp

  int group_rank() const { return call.group->group_rank; }
};

using OperationPtr = std::shared_ptr<Operation>;

struct Envelope {
  int src;
  int tag;
  at::Tensor data;
};

struct Member {
  bool aborted = false;
  std::deque<Envelope> arrived;       // nobody asked for them yet
  std::deque<OperationPtr> receives;  // nothing came for them yet
  int64_t next_collective = 0;
  std::map<std::thread::id, uint64_t> stamps;  // of the next collectives
};

// State that the ranks share.
struct World {
  World(int size, std::string name) : name(std::move(name)), members(size) {}

  const std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Member> members;
  // The n-th collective of every rank; complete when all slots are filled.
  std::map<int64_t, std::vector<OperationPtr>> collectives;

  int size() const { return static_cast<int>(members.size()); }
};

void finish(Operation& operation, std::string error = {}) {
  operation.done = true;
  operation.error = std::move(error);
}

void copy_bytes(const at::Tensor& from, void* to) {
  if (from.nbytes() > 0) std::memcpy(to, from.const_data_ptr(), from.nbytes());
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  copy_bytes(from, to.mutable_data_ptr());
}

at::Tensor copy_of(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

bool matches(const Operation& receive, const Envelope& envelope) {
  return receive.call.tag == envelope.tag && receive.call.peer == envelope.src;
}

void deliver(const Envelope& envelope, Operation& receive) {
  const at::Tensor& to = receive.output;
  if (envelope.data.numel() != to.numel() ||
      envelope.data.scalar_type() != to.scalar_type()) {
    finish(receive, detail::concat("group rank ", envelope.src, " sent ",
                                   describe_tensor(envelope.data),
                                   ", group rank ", receive.group_rank(),
                                   " receives ", describe_tensor(to)));
    return;
  }
  copy_bytes(envelope.data, to);
  finish(receive);
}

// Empty when all members call the same thing with the same arguments.
std::string disagreement(const std::vector<OperationPtr>& members) {
  const Operation& first = *members.front();
  for (const OperationPtr& member : members) {
    const bool tensors_agree =
        first.input.defined() == member->input.defined() &&
        (!first.input.defined() ||
         ((first.input.numel() == member->input.numel() ||
           first.kind == LocalKind::kAllToAllV) &&
          first.input.scalar_type() == member->input.scalar_type()));
    if (member->kind == first.kind && member->op == first.op &&
        member->call.peer == first.call.peer && tensors_agree &&
        member->stamp == first.stamp) {
      continue;
    }
    auto words = [](const Operation& operation) {
      return operation.call.text() + " of " + describe_tensor(operation.input);
    };
    return "the ranks disagree; " + words(first) + "; " + words(*member);
  }
  if (first.kind != LocalKind::kAllToAllV) return {};
  std::vector<Counts> sent;
  std::vector<Counts> received;
  for (const OperationPtr& member : members) {
    sent.push_back(member->sent);
    received.push_back(member->received);
  }
  const std::string text = count_disagreement(sent, received);
  return text.empty() ? text : "the ranks disagree; " + text;
}

OtherCall other_call(const std::vector<OperationPtr>& members,
                     const Operation& own) {
  for (const OperationPtr& member : members) {
    if (member->stamp != own.stamp) {
      return {member->group_rank(), member->stamp};
    }
  }
  return {};
}

at::Tensor reduced_input(const std::vector<OperationPtr>& members) {
  at::NoGradGuard no_grad;
  at::Tensor result = copy_of(members.front()->input).view({-1});
  for (size_t i = 1; i < members.size(); ++i) {
    const at::Tensor input = members[i]->input.detach().view({-1});
    switch (members.front()->op) {
      case ReduceOp::kSum:
        result.add_(input);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, input);
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, input);
        break;
    }
  }
  return result;
}

void scatter(const at::Tensor& whole,
             const std::vector<OperationPtr>& members) {
  const auto* from = static_cast<const char*>(whole.const_data_ptr());
  for (const OperationPtr& member : members) {
    const size_t num_bytes = member->output.nbytes();
    if (num_bytes == 0) continue;
    std::memcpy(member->output.mutable_data_ptr(),
                from + num_bytes * member->group_rank(), num_bytes);
  }
}

void gather(const std::vector<OperationPtr>& members) {
  for (const OperationPtr& receiver : members) {
    auto* to = static_cast<char*>(receiver->output.mutable_data_ptr());
    for (const OperationPtr& sender : members) {
      copy_bytes(sender->input, to);
      to += sender->input.nbytes();
    }
  }
}

void exchange(const std::vector<OperationPtr>& members) {
  for (const OperationPtr& receiver : members) {
    auto* to = static_cast<char*>(receiver->output.mutable_data_ptr());
    const size_t num_bytes = receiver->output.nbytes() / members.size();
    if (num_bytes == 0) continue;
    for (const OperationPtr& sender : members) {
      const auto* from =
          static_cast<const char*>(sender->input.const_data_ptr());
      std::memcpy(to, from + num_bytes * receiver->group_rank(), num_bytes);
      to += num_bytes;
    }
  }
}

int64_t begin_of(const Counts& counts, int group_rank) {
  return std::accumulate(counts.begin(), counts.begin() + group_rank,
                         int64_t{0});
}

void exchange_uneven(const std::vector<OperationPtr>& members) {
  for (const OperationPtr& receiver : members) {
    auto* to = static_cast<char*>(receiver->output.mutable_data_ptr());
    for (const OperationPtr& sender : members) {
      const int target = receiver->group_rank();
      const int64_t element = sender->input.element_size();
      const int64_t num_bytes = sender->sent[target] * element;
      if (num_bytes == 0) continue;
      std::memcpy(to,
                  static_cast<const char*>(sender->input.const_data_ptr()) +
                      begin_of(sender->sent, target) * element,
                  num_bytes);
      to += num_bytes;
    }
  }
}

void run_collective(const std::vector<OperationPtr>& members) {
  const Operation& first = *members.front();
  switch (first.kind) {
    case LocalKind::kAllReduce: {
      const at::Tensor result = reduced_input(members);
      for (const OperationPtr& member : members) {
        copy_bytes(result, member->output);
      }
      break;
    }
    case LocalKind::kBroadcast:
      for (const OperationPtr& member : members) {
        if (member->group_rank() == first.call.peer) continue;
        copy_bytes(members[first.call.peer]->input, member->output);
      }
      break;
    case LocalKind::kAllGather:
      gather(members);
      break;
    case LocalKind::kReduceScatter:
      scatter(reduced_input(members), members);
      break;
    case LocalKind::kAllToAll:
      exchange(members);
      break;
    case LocalKind::kAllToAllV:
      exchange_uneven(members);
      break;
    case LocalKind::kBarrier:
      break;
    case LocalKind::kSend:
    case LocalKind::kRecv:
      SMP_ASSERT(false, "a message is no collective");
  }
}

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<World> world, OperationPtr operation)
      : world_(std::move(world)), operation_(std::move(operation)) {}

  bool done() override {
    std::lock_guard lock(world_->mutex);
    return operation_->done;
  }

  void wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(world_->mutex);
    const bool in_time = world_->changed.wait_for(
        lock, timeout, [&] { return operation_->done; });
    SMP_CHECK(in_time, operation_->call.text(), ": timed out after ",
              timeout.count(), " ms");
    if (operation_->disagreement) {
      throw Disagreement(detail::concat(rank_prefix(), operation_->call.text(),
                                        ": ", operation_->error),
                         operation_->other);
    }
    SMP_CHECK(operation_->error.empty(), operation_->call.text(), ": ",
              operation_->error);
  }

  void abort() override {
    {
      std::lock_guard lock(world_->mutex);
      if (operation_->done) return;
      finish(*operation_, "aborted");
      auto& receives = world_->members[operation_->group_rank()].receives;
      std::erase(receives, operation_);
    }
    world_->changed.notify_all();
  }

 private:
  std::shared_ptr<World> world_;
  OperationPtr operation_;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<World> world, int group_rank)
      : world_(std::move(world)),
        info_(std::make_shared<GroupInfo>(
            GroupInfo{world_->name, group_rank, world_->size()})) {}

  int group_rank() const override { return info_->group_rank; }
  int size() const override { return info_->size; }
  const std::string& name() const override { return info_->name; }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    auto operation = make(LocalKind::kSend, {info_, "send", "dst", dst, tag});
    check_peer(operation->call);
    check_cpu_tensor(tensor, operation->call);
    Envelope envelope{group_rank(), tag, copy_of(tensor)};
    {
      std::lock_guard lock(world_->mutex);
      check_alive(*operation);
      finish(*operation);
      accept(world_->members[dst], std::move(envelope));
    }
    world_->changed.notify_all();
    return std::make_shared<LocalWork>(world_, std::move(operation));
  }

  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    auto operation = make(LocalKind::kRecv, {info_, "recv", "src", src, tag});
    check_peer(operation->call);
    return receive(std::move(operation), std::move(tensor));
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    auto operation = make(LocalKind::kAllReduce, {info_, "all_reduce"});
    check_reducible(tensor, operation->call);
    operation->op = op;
    return collective(std::move(operation), tensor, tensor);
  }

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    auto operation =
        make(LocalKind::kBroadcast, {info_, "broadcast", "root", root});
    check_root(operation->call);
    return collective(std::move(operation), tensor, tensor);
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    auto operation = make(LocalKind::kAllGather, {info_, "all_gather"});
    check_parts(output, input, operation->call);
    return collective(std::move(operation), std::move(output), input);
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    auto operation = make(LocalKind::kReduceScatter, {info_, "reduce_scatter"});
    check_reducible(input, operation->call);
    check_parts(input, output, operation->call);
    operation->op = op;
    return collective(std::move(operation), std::move(output), input);
  }

  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    auto operation = make(LocalKind::kAllToAll, {info_, "all_to_all"});
    check_exchange(output, input, operation->call);
    return collective(std::move(operation), std::move(output), input);
  }

  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    auto operation = make(LocalKind::kAllToAllV, {info_, "all_to_all_v"});
    check_counts(output, input, output_counts, input_counts, operation->call);
    operation->sent = input_counts;
    operation->received = output_counts;
    return collective(std::move(operation), std::move(output), input);
  }

  bool stamp_next(uint64_t stamp) override {
    std::lock_guard lock(world_->mutex);
    world_->members[group_rank()].stamps[std::this_thread::get_id()] = stamp;
    return true;
  }

  WorkPtr barrier() override {
    auto operation = make(LocalKind::kBarrier, {info_, "barrier"});
    return issue(std::move(operation));
  }

  void abort() override {
    {
      std::lock_guard lock(world_->mutex);
      Member& self = world_->members[group_rank()];
      self.aborted = true;
      for (const OperationPtr& receive : self.receives) {
        finish(*receive, "aborted");
      }
      self.receives.clear();
      self.arrived.clear();
      for (auto& [index, members] : world_->collectives) {
        if (members[group_rank()] && !members[group_rank()]->done) {
          finish(*members[group_rank()], "aborted");
        }
      }
    }
    world_->changed.notify_all();
  }

 private:
  static OperationPtr make(LocalKind kind, CallName call) {
    return std::make_shared<Operation>(kind, std::move(call));
  }

  // The lock must be held.
  void check_alive(const Operation& operation) const {
    SMP_CHECK(!world_->members[group_rank()].aborted, operation.call.text(),
              ": aborted");
  }

  // The lock must be held.
  static void accept(Member& receiver, Envelope envelope) {
    if (receiver.aborted) return;
    auto& receives = receiver.receives;
    const auto found = std::find_if(
        receives.begin(), receives.end(),
        [&](const auto& posted) { return matches(*posted, envelope); });
    if (found == receives.end()) {
      receiver.arrived.push_back(std::move(envelope));
      return;
    }
    deliver(envelope, **found);
    receives.erase(found);
  }

  WorkPtr receive(OperationPtr operation, at::Tensor tensor) {
    check_cpu_tensor(tensor, operation->call);
    operation->output = std::move(tensor);
    {
      std::lock_guard lock(world_->mutex);
      check_alive(*operation);
      Member& self = world_->members[group_rank()];
      const auto found = std::find_if(
          self.arrived.begin(), self.arrived.end(),
          [&](const Envelope& one) { return matches(*operation, one); });
      if (found == self.arrived.end()) {
        self.receives.push_back(operation);
      } else {
        deliver(*found, *operation);
        self.arrived.erase(found);
      }
    }
    return std::make_shared<LocalWork>(world_, std::move(operation));
  }

  WorkPtr collective(OperationPtr operation, at::Tensor output,
                     at::Tensor input) {
    check_cpu_tensor(input, operation->call);
    operation->output = std::move(output);
    operation->input = std::move(input);
    return issue(std::move(operation));
  }

  WorkPtr issue(OperationPtr operation) {
    bool complete = false;
    {
      std::lock_guard lock(world_->mutex);
      check_alive(*operation);
      Member& self = world_->members[group_rank()];
      const int64_t index = self.next_collective++;
      const auto stamp = self.stamps.find(std::this_thread::get_id());
      if (stamp != self.stamps.end()) {
        operation->stamp = stamp->second;
        self.stamps.erase(stamp);
      }
      auto& members = world_->collectives[index];
      members.resize(world_->members.size());
      members[group_rank()] = operation;
      // A member that aborted is done already: the others wait in vain, as
      // they would for a process that went away.
      complete = std::all_of(
          members.begin(), members.end(),
          [](const OperationPtr& one) { return one && !one->done; });
      if (complete) {
        std::string error = disagreement(members);
        for (const OperationPtr& one : members) {
          one->disagreement = !error.empty();
          one->other = other_call(members, *one);
        }
        try {
          if (error.empty()) run_collective(members);
        } catch (const std::exception& failure) {
          error = failure.what();
        }
        for (const OperationPtr& one : members) finish(*one, error);
        world_->collectives.erase(index);
      }
    }
    if (complete) world_->changed.notify_all();
    return std::make_shared<LocalWork>(world_, std::move(operation));
  }

  const std::shared_ptr<World> world_;
  const std::shared_ptr<const GroupInfo> info_;
};

}  // namespace

std::vector<CommunicatorPtr> make_local_world(int size, std::string name) {
  SMP_CHECK_VALUE(size >= 1, "make_local_world: expected size >= 1, got ",
                  size);
  auto world = std::make_shared<World>(size, std::move(name));
  std::vector<CommunicatorPtr> communicators;
  communicators.reserve(size);
  for (int group_rank = 0; group_rank < size; ++group_rank) {
    communicators.push_back(
        std::make_shared<LocalCommunicator>(world, group_rank));
  }
  return communicators;
}

}  // namespace smp::comm
