#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>

#include "csrc/comm/communicator.h"
#include "csrc/comm/socket_exchange.h"

namespace smp::comm {

/// Runs the steps of a collective over an exchange, on the thread that calls.
/// Tensors are flat and contiguous; a group has more than one rank. Each call
/// throws Error when it is aborted, when a connection breaks, or when other
/// ranks called something else.
class SocketCollective {
 public:
  /// @param tag   tag of this collective alone
  /// @param note  number equal on all ranks that make the same call
  SocketCollective(SocketExchange& exchange, uint64_t tag, uint64_t note);

  void barrier();
  void all_reduce(const at::Tensor& tensor, ReduceOp op);
  void broadcast(const at::Tensor& tensor, int root);
  void all_gather(const at::Tensor& output, const at::Tensor& input);
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op);
  void all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const Counts& output_counts, const Counts& input_counts);

 private:
  using TransferPtr = SocketExchange::TransferPtr;

  void send(int dst, const at::Tensor& part, uint64_t tag_offset = 0);
  TransferPtr begin_receive(int src, const at::Tensor& part,
                            uint64_t tag_offset = 0);
  void end(const TransferPtr& transfer);
  void receive(int src, const at::Tensor& part) {
    end(begin_receive(src, part));
  }
  void end_sends();

  void gather_in_steps(const at::Tensor& output, const at::Tensor& input);
  void gather_in_ring(const at::Tensor& output, const at::Tensor& input);
  void reduce_in_ring(const at::Tensor& tensor, ReduceOp op);

  int next() const { return (rank_ + 1) % size_; }
  int previous() const { return (rank_ + size_ - 1) % size_; }

  SocketExchange& exchange_;
  const uint64_t tag_;
  const uint64_t note_;
  const int rank_;
  const int size_;
  std::deque<TransferPtr> sends_;
};

}  // namespace smp::comm
