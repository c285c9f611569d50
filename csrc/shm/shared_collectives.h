#pragma once

#include <chrono>
#include <string>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::shm {

struct SharedCollectivesOptions {
  /// Set if this rank shares memory.
  bool enabled = true;
  /// Words equal on ranks that try to share; trying shows whether they can.
  std::string machine = {};
};

/// Adds collectives of host tensors through memory that all ranks of the group
/// map: each rank copies its part once, and the others read it there. Sums are
/// taken in the order of the ranks, hence bitwise alike on all of them and in
/// each run. Ranks that make different calls get a `Disagreement`. Operations
/// make progress while a thread waits for one, or calls its `done`. Messages
/// are sent through `inner`.
///
/// Collective over `inner`. Returns `inner` itself if the ranks have no common
/// memory.
/// @throws PeerFailure when another rank fails meanwhile
comm::CommunicatorPtr share_collectives(comm::CommunicatorPtr inner,
                                        const SharedCollectivesOptions& options,
                                        const comm::WaitOptions& wait);

}  // namespace smp::shm
