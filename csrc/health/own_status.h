#pragma once

#include <memory>
#include <string>

#include "csrc/health/fault_board.h"
#include "csrc/health/file_meter.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/stack_dump.h"
#include "csrc/health/transport_meter.h"
#include "csrc/health/wait_registry.h"

namespace smp::health {

/// Part of a client: what this rank says of itself, and what it sees of the
/// hosts of others. One thread.
class OwnStatus {
 public:
  explicit OwnStatus(std::shared_ptr<FaultBoard> faults);

  /// @param snapshot  of the waits of this rank, now
  LivenessFrame make(const WaitRegistry::Snapshot& snapshot);

  /// The stacks of this process. To show them is no progress.
  std::string stacks(const StackDump& dump);

  /// A host that does not answer is a fault, if this rank waits: the hub may
  /// reach the host of a rank that this one does not reach.
  void watch_peers(const LivenessFrame& status);

 private:
  const std::shared_ptr<FaultBoard> faults_;
  TransportMeter meter_;
  FileMeter files_;
};

}  // namespace smp::health
