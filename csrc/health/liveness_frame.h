#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace smp::health {

/// A message between the hub and its clients.
struct LivenessFrame {
  enum class Type : uint8_t {
    kHello = 1,    ///< client, after the Handshake: global_rank, progress =
                   ///< its process, where = process_space()
    kWelcome,      ///< hub: the hello is accepted
    kRefused,      ///< hub: the hello is refused; text = why
    kStatus,       ///< client, regularly: whether it waits, and where
    kRaised,       ///< client, then hub to the others: where, text
    kRaisedSeen,   ///< hub: told the others
    kLeft,         ///< client: end of the script
    kDied,         ///< hub: connection lost without kLeft
    kUnreachable,  ///< hub, or client, then hub to the others: the host of a
                   ///< rank does not answer; progress = that rank, text = the
                   ///< evidence
    kDeadlock,     ///< hub: every rank waits; text = table
    kStopAsked,    ///< client: stop all ranks at a boundary
    kFreeze,       ///< hub: wait at the next boundary and send its number
    kFrozen,       ///< client: progress = that boundary
    kStopAt,       ///< hub: progress = the boundary at which all stop
    kStacksAsked,  ///< hub: send your stacks
    kStacks,       ///< client: text = Python stacks
    kAlive,        ///< hub, regularly: rank 0 is not stopped
    kMissed,       ///< client, then hub to the others: a rank is needed that
                   ///< has left; progress = that rank, text = where
    kStuck,        ///< hub: some ranks neither wait nor move while others
                   ///< wait; where = their numbers, text = what is known
    kLeftRanks,    ///< hub: text = RankSet of ranks that have left; ranks that
                   ///< have left themselves get it once all have left
    kLeftBeforeAsked,  ///< client: asks for a rank that has left without its
                       ///< part of a collective; collectives = State that waits
                       ///< for it
    kLeftBefore,       ///< hub: there is such a rank; progress = that rank,
                       ///< collectives = group and number of the question.
                       ///< There is no answer otherwise
    kCount,
  };

  Type type = Type::kStatus;
  int32_t global_rank = -1;
  bool is_blocked = false;
  bool device_waits = false;  ///< of kStatus: for other ranks
  int64_t blocked_ms = 0;
  int64_t progress = 0;
  int64_t num_unsent = 0;
  std::string where;  ///< cut to kMaxTextBytes, as `text`
  std::string text;
  std::string collectives;  ///< of kStatus and kLeft: CollectiveLog::State
};

/// The purpose of the Handshake before the frames.
inline constexpr const char* kHubPurpose = "liveness";

inline constexpr size_t kMaxTextBytes = 64 * 1024;

/// Returns the bytes of a frame; they begin with their number.
std::string encode_frame(const LivenessFrame& frame);

/// Removes and returns the first frame of `buffer`; empty when it is not
/// complete yet.
/// @throws Error when the bytes are malformed
std::optional<LivenessFrame> take_frame(std::string& buffer);

/// Returns the words for a duration, as in "2.5 s".
std::string seconds_text(std::chrono::duration<double> duration);

}  // namespace smp::health
