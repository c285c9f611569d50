#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/health/fork_guard.h"
#include "csrc/shm/doorbell.h"
#include "csrc/shm/shared_ring.h"

namespace smp::shm {

/// The identity of a segment, which its maker writes and other ranks check.
struct SegmentStamp {
  std::array<uint64_t, 2> token{};
  int64_t ring_bytes = 0;
  int64_t num_rings = 0;

  bool operator==(const SegmentStamp&) const = default;
};

/// Memory of one rank that others write to: two doorbells, and a ring from each
/// of the others. A view; `mapping` keeps it.
class SharedSegment {
 public:
  SharedSegment() = default;

  /// Makes a file without a name, which others open by the descriptor.
  /// @return errno, or 0
  static int make_file(const SegmentStamp& stamp, health::OwnedFd& fd,
                       SharedSegment& segment);

  /// Opens a descriptor of another process (or of this one).
  /// @return errno, or 0; ESTALE when the segment does not match `stamp`
  static int open(int pid, int fd, const SegmentStamp& stamp,
                  SharedSegment& segment);

  const std::shared_ptr<void>& mapping() const { return mapping_; }
  /// Returns the bell of the receiving thread, followed by that of the sender.
  Doorbell* bells() const;
  RingMemory ring(int64_t index) const;

 private:
  static int map(int fd, const SegmentStamp& stamp, SharedSegment& segment);

  std::shared_ptr<void> mapping_;
  SegmentStamp stamp_;
};

}  // namespace smp::shm
