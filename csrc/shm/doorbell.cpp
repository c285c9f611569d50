#include "csrc/shm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace smp::shm {
namespace {

// The kernel needs the address of a plain word, and other processes need the
// same bytes.
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Without FUTEX_PRIVATE_FLAG: the other side may be another process.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                const timespec* timeout) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, timeout, nullptr, 0);
}

void futex_wake_one(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

void Doorbell::ring() {
  if (registered_.load() == 0) return;
  const uint32_t seat = registered_.exchange(0);
  if (seat == 0) return;
  std::atomic<uint32_t>& count = count_of(static_cast<Seat>(seat));
  count.fetch_add(1);
  futex_wake_one(count);
}

uint32_t Doorbell::prepare(Seat seat) {
  const uint32_t seen = watch(seat);
  registered_.store(static_cast<uint32_t>(seat));
  return seen;
}

void Doorbell::sleep(Seat seat, uint32_t seen,
                     std::optional<std::chrono::milliseconds> timeout) {
  if (timeout) {
    const auto ms = timeout->count();
    const timespec limit{static_cast<time_t>(ms / 1000),
                         static_cast<long>(ms % 1000) * 1'000'000};
    futex_wait(count_of(seat), seen, &limit);
  } else {
    futex_wait(count_of(seat), seen, nullptr);
  }
}

}  // namespace smp::shm
