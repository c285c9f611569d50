#include "csrc/shm/shared_ring.h"

#include <algorithm>
#include <cstring>

#include "csrc/common/check.h"

namespace smp::shm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace

RingWriter::RingWriter(RingMemory memory, Doorbell* reader)
    : memory_(memory), reader_(reader) {}

uint64_t RingWriter::free_bytes() const {
  return memory_.capacity - (position_ - seen_read_);
}

size_t RingWriter::write(const uint8_t* from, size_t size) {
  if (free_bytes() < size) {
    seen_read_ = memory_.control->read.load(std::memory_order_acquire);
    SMP_CHECK(free_bytes() <= memory_.capacity,
              "a ring in shared memory is corrupt: its reader is at byte ",
              seen_read_, ", its writer at ", position_);
  }
  const size_t taken = std::min<uint64_t>(size, free_bytes());
  if (taken == 0) return 0;
  const uint64_t begin = position_ % memory_.capacity;
  const size_t first = std::min<uint64_t>(taken, memory_.capacity - begin);
  std::memcpy(memory_.data + begin, from, first);
  std::memcpy(memory_.data, from + first, taken - first);
  position_ += taken;
  return taken;
}

void RingWriter::publish() {
  memory_.control->written.store(position_);
  reader_->ring();
}

bool RingWriter::must_wait() {
  memory_.control->writer_waits.store(1);
  return memory_.control->read.load() + memory_.capacity == position_;
}

RingReader::RingReader(RingMemory memory, Doorbell* writer)
    : memory_(memory), writer_(writer) {}

size_t RingReader::read(uint8_t* to, size_t size) {
  const uint64_t present = memory_.control->written.load() - position_;
  SMP_CHECK(present <= memory_.capacity,
            "a ring in shared memory is corrupt: its writer is at byte ",
            position_ + present, ", its reader at ", position_);
  const size_t taken = std::min<uint64_t>(size, present);
  if (taken == 0) return 0;
  const uint64_t begin = position_ % memory_.capacity;
  const size_t first = std::min<uint64_t>(taken, memory_.capacity - begin);
  std::memcpy(to, memory_.data + begin, first);
  std::memcpy(to + first, memory_.data, taken - first);
  position_ += taken;
  RingControl& control = *memory_.control;
  control.read.store(position_);
  // Rings only when half is free: else the writer would be woken for each byte.
  if (control.writer_waits.load() != 0 &&
      (present - taken) * 2 <= memory_.capacity &&
      control.writer_waits.exchange(0) != 0) {
    writer_->ring();
  }
  return taken;
}

}  // namespace smp::shm
