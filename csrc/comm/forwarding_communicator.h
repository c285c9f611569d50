#pragma once

#include <string>
#include <utility>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// A communicator that makes all calls of another one; derived classes change
/// some of them.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(CommunicatorPtr inner)
      : inner_(std::move(inner)) {}

  int group_rank() const override { return inner_->group_rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    return inner_->send(tensor, dst, tag);
  }
  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    return inner_->recv(std::move(tensor), src, tag);
  }
  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    return inner_->all_reduce(std::move(tensor), op);
  }
  WorkPtr broadcast(at::Tensor tensor, int root) override {
    return inner_->broadcast(std::move(tensor), root);
  }
  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    return inner_->all_gather(std::move(output), input);
  }
  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    return inner_->reduce_scatter(std::move(output), input, op);
  }
  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    return inner_->all_to_all(std::move(output), input);
  }
  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    return inner_->all_to_all_v(std::move(output), input, output_counts,
                                input_counts);
  }
  WorkPtr barrier() override { return inner_->barrier(); }
  bool stamp_next(uint64_t stamp) override { return inner_->stamp_next(stamp); }
  bool goes_on_alone() const override { return inner_->goes_on_alone(); }
  bool is_stream_ordered() const override {
    return inner_->is_stream_ordered();
  }
  void abort() override { inner_->abort(); }
  void shut_down() noexcept override { inner_->shut_down(); }

 protected:
  const CommunicatorPtr inner_;
};

}  // namespace smp::comm
