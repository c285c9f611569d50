#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "csrc/comm/hierarchical_communicator.h"

namespace smp::comm {

/// One collective, or a piece of one, on its way through the groups of hosts.
/// `leave` and `arrive` wait for other ranks, each in its own thread, and run
/// for one operation after the other. Tensors are flat.
class HostHops {
 public:
  virtual ~HostHops() = default;
  /// Within the host, and begins what crosses.
  virtual void leave(const HostGroups& groups) = 0;
  /// The end of what crosses, and what follows within the host.
  virtual void arrive(const HostGroups& groups) = 0;
};

using HostHopsPtr = std::unique_ptr<HostHops>;

/// @param part   summed in place, of any size
/// @param stamp  of the call (`Communicator::stamp_next`), which ranks of one
///               host compare where their transport does; 0: none
HostHopsPtr make_sum_hops(at::Tensor part, ReduceOp op, uint64_t stamp);
/// As `Communicator::reduce_scatter` and `all_gather` of ranks host by host.
HostHopsPtr make_scatter_hops(at::Tensor output, at::Tensor input, ReduceOp op,
                              uint64_t stamp);
HostHopsPtr make_gather_hops(at::Tensor output, at::Tensor input,
                             uint64_t stamp);

}  // namespace smp::comm
