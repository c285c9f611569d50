#pragma once

#include <memory>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/peer_sockets.h"

namespace smp::comm {

/// Collectives and messages of a group over the connections of this process,
/// which all groups share. CPU tensors.
///
/// Every collective but `all_to_all` sends to group ranks that lie a power of
/// two further on, so that a rank of n has about log2(n) connections to others
/// and as many from others. Short tensors take log2(n) steps, long ones go
/// round a ring in pieces, or down a tree. Every rank gets the same bits.
///
/// Collectives run one after the other in a thread of the group, which begins
/// with the first one. A wait that times out or is aborted leaves the operation
/// alone; a receive that is aborted takes no message any more. Both sides
/// compare sizes, types and what was called, and say what they found.
///
/// @param sockets       outlives nothing: it is kept
/// @param name          equal on all ranks and used once; also words for
///                      errors, for instance "tcp:dp"
/// @param global_ranks  of the group, equal on all its ranks; with this process
CommunicatorPtr make_socket_communicator(std::shared_ptr<PeerSockets> sockets,
                                         std::string name,
                                         std::vector<int> global_ranks);

}  // namespace smp::comm
