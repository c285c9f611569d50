#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "csrc/shm/doorbell.h"

namespace smp::shm {

/// State of a ring of bytes with one writer and one reader, in memory that both
/// map. Zeroed memory is an empty ring. Positions count all bytes ever written
/// and read.
struct RingControl {
  alignas(64) std::atomic<uint64_t> written{0};
  alignas(64) std::atomic<uint64_t> read{0};
  alignas(64) std::atomic<uint32_t> writer_waits{0};
};

/// The addresses of a ring in this process.
struct RingMemory {
  RingControl* control = nullptr;
  uint8_t* data = nullptr;
  uint64_t capacity = 0;
};

/// The writer's end of a ring. One thread at a time may use it.
class RingWriter {
 public:
  RingWriter() = default;
  /// @param reader  doorbell to ring when there are bytes to read
  RingWriter(RingMemory memory, Doorbell* reader);

  /// Copies as many bytes as fit; the reader sees them after `publish`.
  /// @return number of bytes
  size_t write(const uint8_t* from, size_t size);

  /// Makes the written bytes visible to the reader.
  void publish();

  /// Returns whether a writer about to sleep must wait; call it after `prepare`
  /// of its doorbell. False when there is room; otherwise that doorbell rings
  /// when half of the ring is free.
  bool must_wait();

 private:
  uint64_t free_bytes() const;

  RingMemory memory_;
  Doorbell* reader_ = nullptr;
  uint64_t position_ = 0;
  uint64_t seen_read_ = 0;  // the reader's position, perhaps an older one
};

/// The reader's end of a ring. One thread may use it.
class RingReader {
 public:
  RingReader() = default;
  /// @param writer  doorbell to ring when a waiting writer may go on
  RingReader(RingMemory memory, Doorbell* writer);

  bool has_more() const { return memory_.control->written.load() != position_; }

  /// Copies up to `size` of the available bytes and frees their place.
  /// @return number of bytes
  /// @throws Error when the writer's position is invalid
  size_t read(uint8_t* to, size_t size);

 private:
  RingMemory memory_;
  Doorbell* writer_ = nullptr;
  uint64_t position_ = 0;
};

}  // namespace smp::shm
