#include "csrc/health/hub_silence.h"

#include <algorithm>
#include <utility>

#include "csrc/common/log.h"
#include "csrc/health/liveness_frame.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;

// Number of ranks that watch the hub. There are two because one may be stopped
// together with rank 0.
constexpr int kNumWatchers = 2;
// Longest time between two looks; beyond it, this process was stopped.
constexpr milliseconds kStopped{3000};

}  // namespace

HubSilence::HubSilence(std::shared_ptr<FaultBoard> faults, Options options)
    : faults_(std::move(faults)), options_(std::move(options)) {}

void HubSilence::leave_pause_out(Clock::time_point now) {
  const Clock::duration pause = now - std::exchange(checked_at_, now);
  if (pause > std::max(kStopped, 3 * options_.status_every)) {
    last_frame_at_ += pause;  // no frame could be read meanwhile
  }
}

void HubSilence::check(const WaitRegistry::Snapshot& snapshot) {
  const Clock::time_point now = Clock::now();
  leave_pause_out(now);
  if (!snapshot.is_blocked || faults_->fault()) return blocked_since_.reset();
  if (!blocked_since_) blocked_since_ = now - snapshot.blocked_for;
  if (options_.hang_after == milliseconds(0)) return;
  if (options_.hang_raises && now - last_frame_at_ >= 2 * options_.hang_after) {
    return fail(now - last_frame_at_, snapshot.what);
  }
  const Clock::time_point since =
      std::max({last_frame_at_, *blocked_since_, reported_at_});
  if (now - since < options_.hang_after || !is_watcher()) return;
  reported_at_ = now;
  report(now - last_frame_at_, snapshot.what);
}

void HubSilence::report(Clock::duration silence, const std::string& what) {
  const std::string coordinates = faults_->coordinates(kHubRank);
  log_line(LogLevel::kWarning,
           "nothing has moved for " + seconds_text(options_.hang_after) +
               " (SMP_HANG_S) and global_rank " + std::to_string(kHubRank) +
               (coordinates.empty() ? "" : " (" + coordinates + ")") +
               " HAS SAID NOTHING for " + seconds_text(silence) +
               " (stopped, or cut off); this rank waits in " + what);
  if (options_.stacks) {
    log_details(LogLevel::kWarning,
                "Python stacks of this rank:\n" + options_.stacks->take());
  }
}

// Records the fault on this rank only: without the hub there is no way to tell
// other ranks, so each finds it by itself while it waits.
void HubSilence::fail(Clock::duration silence, const std::string& what) {
  faults_->report({.kind = Fault::Kind::kStuck,
                   .global_rank = kHubRank,
                   .text = "it has said nothing for " + seconds_text(silence) +
                           " (stopped, or cut off) while this rank waits in " +
                           what + " (SMP_HANG_S, SMP_HANG_ACTION)"});
}

bool HubSilence::is_watcher() const {
  const int own = faults_->global_rank();
  int num_before = 0;
  for (int rank = kHubRank + 1; rank < own && num_before < kNumWatchers;
       ++rank) {
    num_before += faults_->has_left(rank) ? 0 : 1;
  }
  return own != kHubRank && num_before < kNumWatchers;
}

}  // namespace smp::health
