#include "csrc/comm/c10d_communicator.h"

#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "csrc/comm/c10d_work.h"
#include "csrc/comm/communicator_checks.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  SMP_ASSERT(false, "reduce op ", static_cast<int>(op));
}

// Returns a one-dimensional view of the same memory, outside of any graph.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view({-1}); }

Counts in_bytes(Counts counts, const at::Tensor& tensor) {
  for (int64_t& count : counts) count *= tensor.element_size();
  return counts;
}

using Tensors = std::vector<at::Tensor>;

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(C10dBackendPtr backend, std::string name,
                   C10dOptions options)
      : info_(std::make_shared<GroupInfo>(GroupInfo{
            std::move(name), backend->getRank(), backend->getSize()})),
        shared_(std::make_shared<C10dShared>(std::move(backend),
                                             std::move(options))) {}

  int group_rank() const override { return info_->group_rank; }
  int size() const override { return info_->size; }
  const std::string& name() const override { return info_->name; }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    CallName call{info_, "send", "dst", dst, tag};
    check_peer(call);
    check_device(tensor, call);
    Tensors tensors{tensor};
    return message(std::move(call), tensors, [&](c10d::Backend& backend) {
      return backend.send(tensors, dst, tag);
    });
  }

  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    CallName call{info_, "recv", "src", src, tag};
    check_peer(call);
    check_device(tensor, call);
    Tensors tensors{std::move(tensor)};
    return message(std::move(call), tensors, [&](c10d::Backend& backend) {
      return backend.recv(tensors, src, tag);
    });
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    CallName call{info_, "all_reduce"};
    check_reducible(tensor, call);
    check_device(tensor, call);
    return reduce_all(std::move(call), std::move(tensor), op);
  }

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    CallName call{info_, "broadcast", "root", root};
    check_root(call);
    check_device(tensor, call);
    Tensors tensors{std::move(tensor)};
    return collective(std::move(call), tensors, [&](c10d::Backend& backend) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return backend.broadcast(tensors, options);
    });
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_gather"};
    check_parts(output, input, call);
    check_device(input, call);
    at::Tensor whole = flat(output);
    at::Tensor part = flat(input);
    const auto start = [&](c10d::Backend& backend) {
      if (!shared_->is_gloo) return backend._allgather_base(whole, part);
      std::vector<Tensors> outputs(1);
      for (int i = 0; i < size(); ++i) {
        outputs[0].push_back(whole.narrow(0, i * part.numel(), part.numel()));
      }
      Tensors inputs{part};
      return backend.allgather(outputs, inputs);
    };
    return collective(std::move(call), {whole, part}, start);
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    CallName call{info_, "reduce_scatter"};
    check_reducible(input, call);
    check_parts(input, output, call);
    check_device(input, call);
    at::Tensor part = flat(output);
    if (shared_->is_gloo) {
      at::Tensor whole = flat(input).clone();
      auto finish = [part, whole, index = group_rank()]() mutable {
        part.copy_(whole.narrow(0, index * part.numel(), part.numel()));
      };
      return reduce_all(std::move(call), whole, op, std::move(finish));
    }
    at::Tensor whole = flat(input);
    const auto start = [&](c10d::Backend& backend) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = to_c10d(op);
      return backend._reduce_scatter_base(part, whole, options);
    };
    return collective(std::move(call), {part, whole}, start);
  }

  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_to_all"};
    check_exchange(output, input, call);
    check_device(input, call);
    // Bytes are sent because no backend supports all types here.
    at::Tensor to = flat(output).view(at::kByte);
    at::Tensor from = flat(input).view(at::kByte);
    const auto start = [&](c10d::Backend& backend) {
      std::vector<int64_t> equal_parts;
      return backend.alltoall_base(to, from, equal_parts, equal_parts);
    };
    return collective(std::move(call), {to, from}, start);
  }

  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    CallName call{info_, "all_to_all_v"};
    check_counts(output, input, output_counts, input_counts, call);
    check_device(input, call);
    at::Tensor to = flat(output).view(at::kByte);
    at::Tensor from = flat(input).view(at::kByte);
    Counts to_bytes = in_bytes(output_counts, output);
    Counts from_bytes = in_bytes(input_counts, input);
    const auto start = [&](c10d::Backend& backend) {
      return backend.alltoall_base(to, from, to_bytes, from_bytes);
    };
    return collective(std::move(call), {to, from}, start);
  }

  WorkPtr barrier() override {
    return collective({info_, "barrier"}, {},
                      [](c10d::Backend& backend) { return backend.barrier(); });
  }

  bool is_stream_ordered() const override { return !shared_->is_gloo; }

  void abort() override {
    shared_->watch.abort();
    // Gloo's operations have ended with their waits; device kernels still run.
    if (!shared_->is_gloo) shared_->abort_backend();
  }

  void shut_down() noexcept override {
    if (!shared_->is_gloo) shared_->shut_down_backend();
  }

 private:
  void check_device(const at::Tensor& tensor, const CallName& call) const {
    if (shared_->is_gloo) return check_cpu_tensor(tensor, call);
    check_tensor(tensor, call);
  }

  // Calls the backend and adds the name of the call to its errors.
  template <typename Start>
  C10dWorkPtr issue(const CallName& call, Start&& start) {
    SMP_CHECK(!shared_->watch.aborted(), call.text(), ": aborted");
    try {
      std::lock_guard lock(shared_->issue_mutex);
      return start(*shared_->backend);
    } catch (const std::exception&) {
      throw Error(rank_prefix() + call.text() + ": " +
                  reason_of(std::current_exception()));
    }
  }

  // @param tensors  tensors of the operation, which Gloo keeps by itself
  template <typename Start>
  WorkPtr message(CallName call, Tensors tensors, Start&& start) {
    C10dWorkPtr inner = issue(call, start);
    if (shared_->is_gloo) {
      return make_message_work(shared_, std::move(call), std::move(inner));
    }
    return make_polled_work(shared_, std::move(call), std::move(inner),
                            std::move(tensors));
  }

  template <typename Start>
  WorkPtr collective(CallName call, Tensors tensors, Start&& start,
                     std::function<void()> finish = {}) {
    C10dWorkPtr inner = issue(call, start);
    if (shared_->is_gloo) {
      return make_collective_work(shared_, std::move(call), std::move(inner),
                                  std::move(finish));
    }
    return make_polled_work(shared_, std::move(call), std::move(inner),
                            std::move(tensors));
  }

  WorkPtr reduce_all(CallName call, at::Tensor tensor, ReduceOp op,
                     std::function<void()> finish = {}) {
    Tensors tensors{std::move(tensor)};
    return collective(
        std::move(call), tensors,
        [&](c10d::Backend& backend) {
          c10d::AllreduceOptions options;
          options.reduceOp = to_c10d(op);
          return backend.allreduce(tensors, options);
        },
        std::move(finish));
  }

  const std::shared_ptr<const GroupInfo> info_;
  const C10dSharedPtr shared_;
};

}  // namespace

CommunicatorPtr make_c10d_communicator(
    c10::intrusive_ptr<c10d::Backend> backend, std::string name,
    C10dOptions options) {
  SMP_CHECK_VALUE(backend,
                  "make_c10d_communicator: expected a backend, got "
                  "none");
  return std::make_shared<C10dCommunicator>(std::move(backend), std::move(name),
                                            std::move(options));
}

}  // namespace smp::comm
