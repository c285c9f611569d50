#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/health/fork_guard.h"
#include "csrc/shm/doorbell.h"
#include "csrc/shm/shared_ring.h"

namespace smp::shm {

/// What the rank that makes a segment writes, and others must find in it.
struct SegmentStamp {
  std::array<uint64_t, 2> token{};
  int64_t ring_bytes = 0;
  int64_t num_rings = 0;

  bool operator==(const SegmentStamp&) const = default;
};

/// Memory of one rank that others write to: two doorbells and a ring from each
/// of them. A view; `mapping` keeps it.
class SharedSegment {
 public:
  SharedSegment() = default;

  /// Memory of this process and of children forked later.
  /// @throws Error when the system refuses
  static SharedSegment make_anonymous(const SegmentStamp& stamp);

  /// A file without a name, which others open by the descriptor.
  /// @return errno, or 0
  static int make_file(const SegmentStamp& stamp, health::OwnedFd& fd,
                       SharedSegment& segment);

  /// Opens a descriptor of another process (or of this one).
  /// @return errno, or 0; ESTALE when it is not what `stamp` says
  static int open(int pid, int fd, const SegmentStamp& stamp,
                  SharedSegment& segment);

  const std::shared_ptr<void>& mapping() const { return mapping_; }
  /// Of the receiving thread, and of the sending thread behind it.
  Doorbell* bells() const;
  RingMemory ring(int64_t index) const;

 private:
  static int map(int fd, const SegmentStamp& stamp, SharedSegment& segment);

  std::shared_ptr<void> mapping_;
  SegmentStamp stamp_;
};

}  // namespace smp::shm
