#pragma once

#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/peer_sockets.h"

namespace smp::comm {

/// Makes a communicator over the connections of this process, which all groups
/// share. It serves collectives and messages of CPU tensors.
///
/// Every collective but `all_to_all` sends to group ranks that lie a power of
/// two further on. A rank of n thus has about log2(n) connections to others and
/// as many from others. Short tensors take log2(n) steps. Long ones pass round
/// a ring in pieces, or down a tree. Every rank gets the same bits.
///
/// Collectives run one after the other in a thread of the group, which begins
/// with the first one. A wait that times out or is aborted leaves the operation
/// alone; a receive that is aborted takes no message any more. Both sides
/// compare sizes, types and calls, and report differences.
///
/// @param sockets       connections of this process; kept alive
/// @param name          name equal on all ranks and used once; also words for
///                      errors, for instance "tcp:dp"
/// @param global_ranks  ranks of the group, this process included; equal on all
CommunicatorPtr make_socket_communicator(std::shared_ptr<PeerSockets> sockets,
                                         std::string name,
                                         std::vector<int> global_ranks);

}  // namespace smp::comm
