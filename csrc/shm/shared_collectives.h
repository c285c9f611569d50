#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::shm {

struct SharedCollectivesOptions {
  /// false: this rank shares nothing.
  bool enabled = true;
  /// Only ranks with equal words try; whether they can is then tried out.
  std::string machine = {};
};

/// Collectives of host tensors through memory that all ranks of the group map:
/// each rank copies its part once, and reads those of the others from there.
/// Sums are taken in the order of the ranks, hence bitwise alike on all of them
/// and in each run. Ranks that call different things get a `Disagreement`.
/// Operations make progress while somebody waits for one, or asks whether it is
/// done. Messages go through `inner`.
///
/// Collective over `inner`. Without a common memory of all ranks, `inner`
/// itself.
/// @throws PeerFailure when another rank fails meanwhile
comm::CommunicatorPtr share_collectives(comm::CommunicatorPtr inner,
                                        const SharedCollectivesOptions& options,
                                        const comm::Patience& patience);

/// What ranks that are threads of this process would get, one per `inner`.
std::vector<comm::CommunicatorPtr> share_collectives_locally(
    std::vector<comm::CommunicatorPtr> inner);

}  // namespace smp::shm
