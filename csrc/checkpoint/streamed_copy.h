#pragma once

#include <cstddef>
#include <span>

namespace smp::checkpoint {

/// Copies `from` to `to`, which does not overlap it, as `memcpy`. Many bytes
/// bypass the caches: memory that is only written need not be read first, which
/// counts where several processes copy at once and wait for the memory. Four
/// pages are written in turn, so that the stores of one need not wait for those
/// of another (the idea of large copies in glibc, which begin where a copy is
/// as large as most of the last cache).
/// `to` is at least as long as `from`.
void copy_streamed(std::span<std::byte> to, std::span<const std::byte> from);

}  // namespace smp::checkpoint
