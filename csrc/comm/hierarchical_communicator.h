#pragma once

#include <cstdint>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// The groups through which a collective of several hosts passes. Each has at
/// least two ranks and takes tensors of the host. All belong to one layout
/// (`topology::HostLayout`); each group runs its collectives in its own order.
struct HostGroups {
  CommunicatorPtr flat;     ///< all ranks
  CommunicatorPtr scatter;  ///< the ranks of this host; for this use only
  CommunicatorPtr across;   ///< ranks with the same place; for this use only
  CommunicatorPtr gather;   ///< as `scatter`, but another group
  bool is_host_by_host = false;
};

/// Bytes of one rank's share of a piece of a sum. The hops of several pieces
/// overlap: a host sums one piece while the network carries another. Only the
/// first and last hop of a piece are not hidden by the network.
inline constexpr int64_t kShareBytes = int64_t{1} << 20;

/// Makes `flat` sum in three hops: each host adds up, and each of its ranks
/// keeps a share; ranks with the same place sum their share; each host gathers.
/// A host thus sends 2 (h - 1) / h times the bytes of the tensor, on h hosts,
/// for any number of ranks, and its ranks send equally. If ranks are host by
/// host, reduce_scatter takes the first two hops and all_gather the reverse. In
/// each, (h - 1) / h times the whole tensor crosses per host, however the
/// backend implements reduce_scatter. All other calls are those of `flat`.
///
/// Every rank gets the same bits, the same in each run. Two threads of the
/// group run the hops, even without a wait: one until the transfer between
/// hosts has begun, one from there. After an error no operation goes on.
/// Source: balanced use of all links as Herring (SC '20) and hierarchical
/// all-reduce of Horovod and NCCL.
/// @throws ValueError if the groups do not make up `flat`
CommunicatorPtr make_hierarchical_communicator(HostGroups groups);

}  // namespace smp::comm
