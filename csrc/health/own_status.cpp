#include "csrc/health/own_status.h"

#include <optional>
#include <string>
#include <utility>

#include "csrc/health/socket.h"

namespace smp::health {

OwnStatus::OwnStatus(std::shared_ptr<FaultBoard> faults)
    : faults_(std::move(faults)) {}

LivenessFrame OwnStatus::make(const WaitRegistry::Snapshot& snapshot) {
  LivenessFrame status;
  status.type = LivenessFrame::Type::kStatus;
  status.global_rank = faults_->global_rank();
  status.is_blocked = snapshot.is_blocked;
  status.blocked_ms = snapshot.blocked_for.count();
  status.progress = snapshot.progress;
  status.num_unsent = snapshot.num_unsent;
  if (snapshot.is_blocked) {
    status.progress += meter_.read();
    // The network sends lost bytes again; until then no rank is stuck.
    status.num_unsent += meter_.num_lost();
    status.collectives =
        faults_->waits().collectives().state(snapshot.collective).encode();
  } else {
    status.progress += files_.read();
  }
  status.device_waits = snapshot.device_waits;
  status.where = faults_->coordinates(faults_->global_rank());
  status.text = snapshot.is_blocked ? snapshot.what : snapshot.activity;
  return status;
}

std::string OwnStatus::stacks(const StackDump& dump) {
  std::string text;
  files_.leave_out([&] { text = dump.take(); });
  return text;
}

void OwnStatus::watch_peers(const LivenessFrame& status) {
  if (!status.is_blocked || faults_->fault()) return;
  const std::optional<std::string> address = meter_.unreachable();
  const int rank = address ? faults_->rank_at(*address) : -1;
  const int own_rank = faults_->global_rank();
  if (rank < 0 || rank == own_rank) return;
  const std::string own = faults_->coordinates(own_rank);
  faults_->report({.kind = Fault::Kind::kUnreachable,
                   .global_rank = rank,
                   .text = unreachable_text() + ", as seen by global_rank " +
                           std::to_string(own_rank) +
                           (own.empty() ? "" : " (" + own + ")"),
                   .is_found_here = true});
}

}  // namespace smp::health
