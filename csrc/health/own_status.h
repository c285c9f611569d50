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

/// Part of a client: collects this rank's status, and watches the hosts of
/// other ranks. Used by one thread.
class OwnStatus {
 public:
  explicit OwnStatus(std::shared_ptr<FaultBoard> faults);

  /// @param snapshot  the current waits of this rank
  LivenessFrame make(const WaitRegistry::Snapshot& snapshot);

  /// Returns the stacks of this process. Taking them is not counted as
  /// progress.
  std::string stacks(const StackDump& dump);

  /// Reports a host that does not answer as a fault, if this rank waits. The
  /// hub may reach the host of a rank that this rank does not reach.
  void watch_peers(const LivenessFrame& status);

 private:
  const std::shared_ptr<FaultBoard> faults_;
  TransportMeter meter_;
  FileMeter files_;
};

}  // namespace smp::health
