#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/comm/forwarding_communicator.h"
#include "csrc/common/check.h"

namespace smp::comm {

/// The calls that a process has issued, over all of its groups, in order.
struct IssueLog {
  void add(const std::string& group, std::string call) {
    const std::lock_guard lock(mutex);
    issued.emplace_back(group, std::move(call));
  }

  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> issued;
  std::atomic<bool> allows_waits = false;
};

/// A collective whose results must not be read before `order_stream`. A `wait`
/// of the host raises.
class StreamedWork final : public Work {
 public:
  /// @param input   in use until then
  /// @param output  shows `result` afterwards, NaN before
  StreamedWork(WorkPtr inner, std::shared_ptr<IssueLog> log, std::string call,
               at::Tensor input, at::Tensor output, at::Tensor result)
      : inner_(std::move(inner)),
        log_(std::move(log)),
        call_(std::move(call)),
        input_(std::move(input)),
        output_(std::move(output)),
        result_(std::move(result)) {
    if (input_.defined()) read_ = input_.clone();
    if (output_.defined()) poison();
  }

  bool done() override { return is_ordered_ || inner_->done(); }

  void wait(std::chrono::milliseconds) override {
    if (!log_->allows_waits) {
      throw Error("the host has waited for " + call_ + " of a device");
    }
    order_stream();
  }

  bool order_stream() override {
    const std::lock_guard lock(mutex_);
    if (is_ordered_) return true;
    const at::NoGradGuard no_grad;
    inner_->wait(std::chrono::seconds(60));
    if (input_.defined() && !same(input_, read_)) {
      throw Error("the input of " + call_ + " was written while it was read");
    }
    if (output_.defined()) {
      if (!is_poisoned()) {
        throw Error("the output of " + call_ + " was used before it was there");
      }
      output_.copy_(result_);
    }
    is_ordered_ = true;
    return true;
  }

  void abort() override { inner_->abort(); }

 private:
  static bool same(const at::Tensor& a, const at::Tensor& b) {
    return a.nbytes() == 0 ||
           std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  }
  // NaN in every floating dtype.
  void poison() {
    if (output_.nbytes() == 0) return;
    std::memset(output_.mutable_data_ptr(), 0xff, output_.nbytes());
  }
  bool is_poisoned() const {
    const auto* bytes =
        static_cast<const unsigned char*>(output_.const_data_ptr());
    for (size_t i = 0; i < output_.nbytes(); ++i) {
      if (bytes[i] != 0xff) return false;
    }
    return true;
  }

  const WorkPtr inner_;
  const std::shared_ptr<IssueLog> log_;
  const std::string call_;
  const at::Tensor input_;
  const at::Tensor output_;
  const at::Tensor result_;
  at::Tensor read_;
  std::mutex mutex_;
  std::atomic<bool> is_ordered_ = false;
};

/// A group of the host that looks like one of a device: whoever waits on the
/// host, reads a result before its stream is ordered, or writes what is still
/// being read, gets an error or NaN.
class StreamGroup final : public ForwardingCommunicator {
 public:
  explicit StreamGroup(CommunicatorPtr inner,
                       std::shared_ptr<IssueLog> log = nullptr,
                       std::string name = "stream")
      : ForwardingCommunicator(std::move(inner)),
        log_(log ? std::move(log) : std::make_shared<IssueLog>()),
        name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  bool is_stream_ordered() const override { return true; }
  bool stamp_next(uint64_t /*stamp*/) override { return false; }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    const at::Tensor own = copy_of(tensor);
    return begin("all_reduce", {}, tensor, own, inner_->all_reduce(own, op));
  }
  WorkPtr broadcast(at::Tensor tensor, int root) override {
    const at::Tensor own = copy_of(tensor);
    return begin("broadcast", {}, tensor, own, inner_->broadcast(own, root));
  }
  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    const at::Tensor whole = at::empty_like(output.detach());
    // The input may be a part of the output, which shows nothing meanwhile.
    const at::Tensor read =
        output.is_alias_of(input) ? at::Tensor() : input.detach();
    return begin("all_gather", read, output, whole,
                 inner_->all_gather(whole, copy_of(input)));
  }
  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    const at::Tensor part = at::empty_like(output.detach());
    return begin("reduce_scatter", input.detach(), output, part,
                 inner_->reduce_scatter(part, copy_of(input), op));
  }
  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    const at::Tensor parts = at::empty_like(output.detach());
    return begin("all_to_all", input.detach(), output, parts,
                 inner_->all_to_all(parts, copy_of(input)));
  }
  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    const at::Tensor parts = at::empty_like(output.detach());
    return begin("all_to_all_v", input.detach(), output, parts,
                 inner_->all_to_all_v(parts, copy_of(input), output_counts,
                                      input_counts));
  }
  WorkPtr barrier() override {
    return begin("barrier", {}, {}, {}, inner_->barrier());
  }

 private:
  static at::Tensor copy_of(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    return tensor.detach().clone();
  }

  WorkPtr begin(const char* operation, at::Tensor input,
                const at::Tensor& output, at::Tensor result, WorkPtr work) {
    const int64_t numel = output.defined() ? output.numel() : 0;
    std::string call = detail::concat(operation, "[", numel, "]");
    log_->add(name_, call);
    return std::make_shared<StreamedWork>(
        std::move(work), log_, call + " over " + name_, std::move(input),
        output.defined() ? output.detach() : output, std::move(result));
  }

  const std::shared_ptr<IssueLog> log_;
  const std::string name_;
};

/// With SMP_TEST_STREAMS in the environment the tests of a room run over groups
/// that look like a device's: no host waits, and each bit is as without.
inline bool streams_wanted() {
  return std::getenv("SMP_TEST_STREAMS") != nullptr;
}

inline CommunicatorPtr as_wanted(CommunicatorPtr group) {
  if (!group || !streams_wanted()) return group;
  return std::make_shared<StreamGroup>(std::move(group));
}

}  // namespace smp::comm
