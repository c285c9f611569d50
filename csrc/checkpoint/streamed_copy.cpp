#include "csrc/checkpoint/streamed_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace smp::checkpoint {

namespace {

constexpr size_t kLineBytes = 64;

#if defined(__SSE2__)
constexpr size_t kPageBytes = 4096;
constexpr size_t kPages = 4;
// Smaller copies are better in a cache, for the code that reads them next.
constexpr size_t kStreamedBytes = 1 << 20;

void stream_line(std::byte* to, const std::byte* from) {
  for (size_t at = 0; at < kLineBytes; at += sizeof(__m128i)) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(source));
  }
}

// Copies whole groups of pages, from the aligned `to` on, and returns their
// bytes.
size_t stream_groups(std::byte* to, const std::byte* from, size_t count) {
  constexpr size_t kGroupBytes = kPages * kPageBytes;
  size_t group = 0;
  for (; group + kGroupBytes <= count; group += kGroupBytes) {
    for (size_t line = 0; line < kPageBytes; line += kLineBytes) {
      for (size_t page = 0; page < kGroupBytes; page += kPageBytes) {
        const size_t at = group + page + line;
        stream_line(to + at, from + at);
      }
    }
  }
  _mm_sfence();  // such stores are not in order with others
  return group;
}
#else
constexpr size_t kStreamedBytes = SIZE_MAX;

size_t stream_groups(std::byte*, const std::byte*, size_t) { return 0; }
#endif

}  // namespace

void copy_streamed(std::span<std::byte> to, std::span<const std::byte> from) {
  size_t done = 0;
  if (from.size() >= kStreamedBytes) {
    const auto past = reinterpret_cast<uintptr_t>(to.data()) % kLineBytes;
    const size_t head = (kLineBytes - past) % kLineBytes;
    std::memcpy(to.data(), from.data(), head);
    done = head + stream_groups(to.data() + head, from.data() + head,
                                from.size() - head);
  }
  if (done < from.size()) {
    std::memcpy(to.data() + done, from.data() + done, from.size() - done);
  }
}

}  // namespace smp::checkpoint
