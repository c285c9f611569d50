#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "csrc/comm/hierarchical_communicator.h"

namespace smp::comm {

/// The hops of a collective, or of a piece of one, through the groups of hosts.
/// `leave` and `arrive` wait for other ranks, each in its own thread, and run
/// for one operation after the other. Tensors are flat.
class HostHops {
 public:
  virtual ~HostHops() = default;
  /// Runs the hop within the host and begins the transfer between hosts.
  virtual void leave(const HostGroups& groups) = 0;
  /// Ends the transfer between hosts and runs the last hop within the host.
  virtual void arrive(const HostGroups& groups) = 0;
};

using HostHopsPtr = std::unique_ptr<HostHops>;

/// @param part   part to sum in place, of any size
/// @param stamp  stamp of the call (`Communicator::stamp_next`), which ranks of
///               one host compare if their transport does; 0: none
HostHopsPtr make_sum_hops(at::Tensor part, ReduceOp op, uint64_t stamp);
/// Makes the hops of a `Communicator::reduce_scatter` whose ranks are host by
/// host.
HostHopsPtr make_scatter_hops(at::Tensor output, at::Tensor input, ReduceOp op,
                              uint64_t stamp);
HostHopsPtr make_gather_hops(at::Tensor output, at::Tensor input,
                             uint64_t stamp);

}  // namespace smp::comm
