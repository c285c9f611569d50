#include "csrc/shm/shared_collectives_setup.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <type_traits>
#include <utility>

#include "csrc/shm/collective_memory.h"
#include "csrc/shm/shared_collectives.h"
#include "csrc/shm/shared_segment.h"

namespace smp::shm {
namespace {

// Returns the only area of a segment; it keeps the segment's mapping.
std::shared_ptr<uint8_t> area_of(const SharedSegment& segment) {
  return {segment.mapping(), segment.ring(0).data};
}

SegmentStamp new_stamp() {
  SegmentStamp stamp{{}, CollectiveMemory::bytes_per_rank(), 1};
  std::random_device random;
  for (uint64_t& word : stamp.token) {
    word = uint64_t{random()} << 32 | random();
  }
  return stamp;
}

// The place of a rank's segment, if it has one.
struct SegmentOffer {
  SegmentStamp stamp;
  uint64_t machine;
  int32_t pid;
  int32_t fd;
  int32_t is_made;
  int32_t padding;
};

template <typename Record>
std::vector<Record> exchange(comm::Communicator& group,
                             const comm::WaitOptions& wait, const Record& own) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const at::TensorOptions options(at::kByte);
  const at::Tensor input = at::empty({sizeof(Record)}, options);
  std::memcpy(input.mutable_data_ptr(), &own, sizeof(Record));
  const at::Tensor output =
      at::empty({group.size() * static_cast<int64_t>(sizeof(Record))}, options);
  comm::wait_for(*group.all_gather(output, input), wait, group,
                 "set-up of shared memory");
  std::vector<Record> all(static_cast<size_t>(group.size()));
  std::memcpy(all.data(), output.const_data_ptr(), output.nbytes());
  return all;
}

}  // namespace

comm::CommunicatorPtr share_collectives(comm::CommunicatorPtr inner,
                                        const SharedCollectivesOptions& options,
                                        const comm::WaitOptions& wait) {
  if (inner->size() == 1) return inner;
  health::OwnedFd fd;
  SharedSegment own;
  SegmentOffer offer{new_stamp(), std::hash<std::string>{}(options.machine),
                     ::getpid(),  -1,
                     0,           0};
  if (options.enabled) {
    offer.is_made = SharedSegment::make_file(offer.stamp, fd, own) == 0;
    offer.fd = fd.get();
  }
  const auto offers = exchange(*inner, wait, offer);
  int64_t is_complete = 1;
  std::vector<std::shared_ptr<uint8_t>> areas;
  for (int other = 0; other < inner->size() && is_complete; ++other) {
    const SegmentOffer& theirs = offers[other];
    SharedSegment segment = own;
    if (theirs.is_made == 0 || theirs.machine != offer.machine ||
        (other != inner->group_rank() &&
         SharedSegment::open(theirs.pid, theirs.fd, theirs.stamp, segment) !=
             0)) {
      is_complete = 0;
    } else {
      areas.push_back(area_of(segment));
    }
  }
  // All ranks use the memory or none. No rank closes its file before all have
  // opened it.
  const auto verdicts = exchange(*inner, wait, is_complete);
  if (std::find(verdicts.begin(), verdicts.end(), 0) != verdicts.end()) {
    return inner;
  }
  return make_shared_communicator(std::move(inner), std::move(areas));
}

}  // namespace smp::shm
