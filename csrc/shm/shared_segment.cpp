#include "csrc/shm/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

namespace smp::shm {
namespace {

constexpr uint64_t kMagic = 0x31474e4952504d53;  // "SMPRING1"
constexpr int64_t kPage = 4096;

// The start of each segment; the controls of the rings follow.
struct Head {
  uint64_t magic;
  SegmentStamp stamp;
  std::array<Doorbell, 2> bells;
};

int64_t data_offset(const SegmentStamp& stamp) {
  const int64_t bytes =
      static_cast<int64_t>(sizeof(Head)) +
      stamp.num_rings * static_cast<int64_t>(sizeof(RingControl));
  return (bytes + kPage - 1) / kPage * kPage;
}

int64_t size_of(const SegmentStamp& stamp) {
  return data_offset(stamp) + stamp.num_rings * stamp.ring_bytes;
}

Head& head_of(void* memory) { return *static_cast<Head*>(memory); }

// Stamps new memory. The system zeroes it, as bells and rings need at first.
void stamp_memory(void* memory, const SegmentStamp& stamp) {
  head_of(memory).stamp = stamp;
  head_of(memory).magic = kMagic;
}

}  // namespace

int SharedSegment::map(int fd, const SegmentStamp& stamp,
                       SharedSegment& segment) {
  const auto size = static_cast<size_t>(size_of(stamp));
  void* memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return errno;
  segment.mapping_ = {memory, [size](void* mapped) { ::munmap(mapped, size); }};
  segment.stamp_ = stamp;
  return 0;
}

int SharedSegment::make_file(const SegmentStamp& stamp, health::OwnedFd& fd,
                             SharedSegment& segment) {
  health::OwnedFd made(
      ::memfd_create("smp-rings", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made) return errno;
  // No process can make the segment smaller while others map it.
  if (::ftruncate(made.get(), size_of(stamp)) != 0 ||
      ::fcntl(made.get(), F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return errno;
  }
  if (const int error = map(made.get(), stamp, segment)) return error;
  // Children forked by the user (data loaders) do not need the mapping.
  ::madvise(segment.mapping_.get(), static_cast<size_t>(size_of(stamp)),
            MADV_DONTFORK);
  stamp_memory(segment.mapping_.get(), stamp);
  fd = std::move(made);
  return 0;
}

int SharedSegment::open(int pid, int fd, const SegmentStamp& stamp,
                        SharedSegment& segment) {
  const std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  // In another process namespace the number may belong to another file: the
  // flags keep the open from blocking.
  const health::OwnedFd opened(
      ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!opened) return errno;
  struct stat info{};
  if (::fstat(opened.get(), &info) != 0) return errno;
  if (!S_ISREG(info.st_mode) || info.st_size != size_of(stamp)) return ESTALE;
  SharedSegment found;
  if (const int error = map(opened.get(), stamp, found)) return error;
  ::madvise(found.mapping_.get(), static_cast<size_t>(size_of(stamp)),
            MADV_DONTFORK);
  const Head& head = head_of(found.mapping_.get());
  if (head.magic != kMagic || head.stamp != stamp) return ESTALE;
  segment = std::move(found);
  return 0;
}

Doorbell* SharedSegment::bells() const {
  return head_of(mapping_.get()).bells.data();
}

RingMemory SharedSegment::ring(int64_t index) const {
  auto* begin = static_cast<uint8_t*>(mapping_.get());
  auto* controls = reinterpret_cast<RingControl*>(begin + sizeof(Head));
  return {controls + index,
          begin + data_offset(stamp_) + index * stamp_.ring_bytes,
          static_cast<uint64_t>(stamp_.ring_bytes)};
}

}  // namespace smp::shm
