#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace smp::lanes {

/// The way in which a tensor's data get from one device to another.
enum class LaneKind : uint8_t {
  kHost = 1,  ///< through memory of both hosts
  kFake = 2,  ///< for tests: data that come late, on the CPU
  kIpc = 3,   ///< device memory that two processes of one host map
  kNccl = 4,  ///< between devices whose memory the other rank cannot map
};
inline constexpr int kMaxLaneKind = 4;

/// Returns whether messages carry the data of the lane's tensors.
inline bool is_in_messages(LaneKind kind) {
  return kind == LaneKind::kHost || kind == LaneKind::kFake;
}

/// Returns whether copies of the lane have turns (CopyTurns). Receipts then
/// make copies end.
inline bool has_turns(LaneKind kind) { return kind == LaneKind::kNccl; }

/// Returns the words for people.
inline const char* to_string(LaneKind kind) {
  switch (kind) {
    case LaneKind::kHost:
      return "host lane";
    case LaneKind::kFake:
      return "fake lane";
    case LaneKind::kIpc:
      return "mapped memory";
    case LaneKind::kNccl:
      return "NCCL";
  }
  return "unknown lane";
}

/// The part of a message that replaces a tensor that travels over a lane.
struct Descriptor {
  LaneKind lane = LaneKind::kHost;
  /// Slot of the sender's ring, or index of the pair's channel; -1: the lane
  /// has none.
  int32_t slot = -1;
  int64_t sequence = 0;  ///< number in the lane, for one pair of ranks
  int64_t num_bytes = 0;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes = {};
};

/// A message of the receiver that a slot is free, or that its part of a copy
/// over NCCL is enqueued; there also a message of a sender to a lower rank.
struct Receipt {
  LaneKind lane = LaneKind::kHost;
  int32_t slot = -1;
  int64_t sequence = 0;
};

/// Counts of tensors that the lanes of a rank have carried so far.
struct LaneCounters {
  int64_t tensors_sent = 0;
  int64_t bytes_sent = 0;
  int64_t tensors_received = 0;
  /// Sent tensors that found no free slot or channel, and took the host lane.
  int64_t times_full = 0;
  /// Sent tensors that were larger than a slot, and took the host lane.
  int64_t times_too_large = 0;
};

}  // namespace smp::lanes
