#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/shm/collective_memory.h"
#include "csrc/shm/shared_collectives_setup.h"
#include "csrc/shm/shared_memory.h"
#include "csrc/shm/shared_segment.h"

namespace smp::shm {

/// Makes a segment that children forked later share too.
inline SharedSegment make_inherited_segment(int64_t ring_bytes,
                                            int64_t num_rings) {
  health::OwnedFd fd;
  SharedSegment segment;
  const int error =
      SharedSegment::make_file({{}, ring_bytes, num_rings}, fd, segment);
  SMP_CHECK(error == 0, "cannot make shared memory: errno ", error);
  auto* const begin = static_cast<uint8_t*>(segment.mapping().get());
  const RingMemory last = segment.ring(num_rings - 1);
  ::madvise(begin, static_cast<size_t>(last.data + last.capacity - begin),
            MADV_DOFORK);
  return segment;
}

/// Makes memory for `size` ranks that are threads of this process, or processes
/// forked from it later: one per global rank.
inline std::vector<SharedMemoryPtr> make_local_shared_memory(
    int size, int64_t ring_bytes) {
  std::vector<SharedSegment> segments;
  std::vector<SharedMemory::Mapping> mappings;
  for (int i = 0; i < size; ++i) {
    segments.push_back(make_inherited_segment(ring_bytes, size));
    mappings.push_back(segments.back().mapping());
  }
  std::vector<SharedMemoryPtr> result;
  for (int self = 0; self < size; ++self) {
    std::vector<SharedMemory::Peer> peers;
    for (int other = 0; other < size; ++other) {
      if (other == self) continue;
      const SharedSegment& theirs = segments[other];
      peers.push_back(
          {other,
           {theirs.ring(self), theirs.bells() + SharedMemory::kReceiveBell},
           {segments[self].ring(other),
            theirs.bells() + SharedMemory::kSendBell}});
    }
    result.push_back(std::make_shared<SharedMemory>(
        mappings, segments[self].bells(), std::move(peers)));
  }
  return result;
}

/// Makes what `share_collectives` makes for ranks that are threads of this
/// process, one per `inner`.
inline std::vector<comm::CommunicatorPtr> share_collectives_locally(
    std::vector<comm::CommunicatorPtr> inner) {
  if (inner.size() == 1) return inner;
  std::vector<std::shared_ptr<uint8_t>> areas;
  for (size_t i = 0; i < inner.size(); ++i) {
    const SharedSegment segment =
        make_inherited_segment(CollectiveMemory::bytes_per_rank(), 1);
    areas.emplace_back(segment.mapping(), segment.ring(0).data);
  }
  std::vector<comm::CommunicatorPtr> result;
  for (const comm::CommunicatorPtr& one : inner) {
    result.push_back(make_shared_communicator(one, areas));
  }
  return result;
}

}  // namespace smp::shm
