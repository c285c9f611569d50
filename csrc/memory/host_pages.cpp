#include "csrc/memory/host_pages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <malloc.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "csrc/common/check.h"

namespace smp::memory {
namespace {

constexpr uintptr_t kPage = 4096;
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

uintptr_t round_up(uintptr_t value, uintptr_t unit) {
  return (value + unit - 1) / unit * unit;
}

struct Mapping {
  void* begin;
  size_t size;
};

void unmap(void* mapping) {
  const std::unique_ptr<Mapping> owned(static_cast<Mapping*>(mapping));
  ::munmap(owned->begin, owned->size);
}

void* map(size_t size) {
  void* const begin = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  SMP_CHECK(begin != MAP_FAILED, "expected ", size,
            " bytes of host memory, the system has none: ",
            std::strerror(errno));
  return begin;
}

// Huge pages begin at multiples of their size; what lies before and behind goes
// back at once.
void* map_for_huge_pages(size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(map(size + kHugePage));
  const uintptr_t used = round_up(begin, kHugePage);
  if (used > begin) ::munmap(reinterpret_cast<void*>(begin), used - begin);
  const uintptr_t end = begin + size + kHugePage;
  if (end > used + size) {
    ::munmap(reinterpret_cast<void*>(used + size), end - used - size);
  }
  auto* const result = reinterpret_cast<void*>(used);
  ::madvise(result, size, MADV_HUGEPAGE);  // without them it is slower only
  return result;
}

}  // namespace

at::DataPtr take_pages(int64_t num_bytes) {
  SMP_ASSERT(num_bytes > 0, num_bytes, " bytes of pages");
  const size_t size = round_up(static_cast<uintptr_t>(num_bytes), kPage);
  void* const begin = size < kHugePage ? map(size) : map_for_huge_pages(size);
  return {begin, new Mapping{begin, size}, &unmap, at::Device(at::kCPU)};
}

at::Tensor empty_in_pages(int64_t numel, const at::TensorOptions& options) {
  const auto num_bytes =
      numel * static_cast<int64_t>(options.dtype().itemsize());
  if (!options.device().is_cpu() || num_bytes < kOwnPagesBytes) {
    return at::empty({numel}, options);
  }
  auto pages = std::make_shared<at::DataPtr>(take_pages(num_bytes));
  void* const begin = pages->get();
  return at::from_blob(
      begin, {numel}, [pages](void*) mutable { pages.reset(); }, options);
}

void trim_heap() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace smp::memory
