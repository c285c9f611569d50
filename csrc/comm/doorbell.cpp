#include "csrc/comm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace smp::comm {
namespace {

// The kernel wants the address of a plain word, and other processes the same
// bytes.
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Not FUTEX_PRIVATE_FLAG: the other side may be another process.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                const timespec* timeout) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, timeout, nullptr, 0);
}

void futex_wake_one(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

void Doorbell::ring() {
  if (is_sleeping_.load() == 0) return;
  if (is_sleeping_.exchange(0) != 0) futex_wake_one(is_sleeping_);
}

void Doorbell::sleep(std::optional<std::chrono::milliseconds> timeout) {
  if (timeout) {
    const auto ms = timeout->count();
    const timespec limit{static_cast<time_t>(ms / 1000),
                         static_cast<long>(ms % 1000) * 1'000'000};
    futex_wait(is_sleeping_, 1, &limit);
  } else {
    futex_wait(is_sleeping_, 1, nullptr);
  }
  is_sleeping_.store(0);
}

}  // namespace smp::comm
