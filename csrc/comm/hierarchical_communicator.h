#pragma once

#include <cstdint>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// The groups through which a collective of several hosts goes, each with at
/// least two ranks, of tensors of the host. Of one layout
/// (`topology::HostLayout`); what is in a group runs in its own order.
struct HostGroups {
  CommunicatorPtr flat;     ///< all ranks
  CommunicatorPtr scatter;  ///< the ranks of this host; nobody else uses it
  CommunicatorPtr across;   ///< ranks with the same place; nobody else uses it
  CommunicatorPtr gather;   ///< as `scatter`, and a group of its own
  bool is_host_by_host = false;
};

/// Bytes of one rank's share of a piece of a sum. The hops of several pieces
/// run at the same time, so a host sums one while the network carries another;
/// what is not hidden behind the network is the first and last hop of a piece.
inline constexpr int64_t kShareBytes = int64_t{1} << 20;

/// `flat`, whose sums go in three hops: each host adds up, and each of its
/// ranks keeps a share; ranks with the same place sum their share; each host
/// gathers. So a host sends 2 (h - 1) / h times the bytes of the tensor, on h
/// hosts, whatever the number of its ranks, and all of its ranks send equally.
/// Where ranks are host by host, reduce_scatter takes the first two hops, and
/// all_gather the way back; per host (h - 1) / h times the whole tensor cross
/// in each, whatever the backend makes of a reduce_scatter. Everything else is
/// that of `flat`.
///
/// Every rank gets the same bits, the same in each run. Two threads of the
/// group carry the hops out, whether or not somebody waits: one until what
/// crosses is on its way, one from there. After an error nothing goes on.
/// Source: balanced use of all links as Herring (SC '20) and hierarchical
/// all-reduce of Horovod and NCCL.
/// @throws ValueError where the groups do not make up `flat`
CommunicatorPtr make_hierarchical_communicator(HostGroups groups);

}  // namespace smp::comm
