#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace smp::lanes {

/// How the data of a tensor get from one device to another one.
enum class LaneKind : uint8_t {
  kHost = 1,  ///< through memory of both hosts
  kFake = 2,  ///< of tests: data that come late, on the CPU
  kIpc = 3,   ///< device memory that two processes of one host map
  kNccl = 4,  ///< between devices whose memory the other rank cannot map
};
inline constexpr int kMaxLaneKind = 4;

/// Whether messages carry the data of its tensors.
inline bool is_in_messages(LaneKind kind) {
  return kind == LaneKind::kHost || kind == LaneKind::kFake;
}

/// What people read.
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

/// What a message says in place of a tensor that travels over a lane.
struct Descriptor {
  LaneKind lane = LaneKind::kHost;
  /// Of the sender's ring, or which way of its pair; -1: the lane has none.
  int32_t slot = -1;
  int64_t sequence = 0;  ///< of the lane, among tensors of one pair of ranks
  int64_t num_bytes = 0;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes = {};
};

/// The receiver needs a slot no longer.
struct Receipt {
  LaneKind lane = LaneKind::kHost;
  int32_t slot = -1;
  int64_t sequence = 0;
};

/// What went over the lanes of a rank so far.
struct LaneCounters {
  int64_t tensors_sent = 0;
  int64_t bytes_sent = 0;
  int64_t tensors_received = 0;
  /// Of those sent: found no free slot or way, so that the host lane took them.
  int64_t times_full = 0;
  /// Likewise: larger than a slot.
  int64_t times_too_large = 0;
};

}  // namespace smp::lanes
