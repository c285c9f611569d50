#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tests/cpp/cuda_runtime/fake_cuda.h"

// The part of the stand-in that processes share.

namespace smp::fake_cuda {

/// The records of an event: it was asked for so often, and came so often.
struct Records {
  std::atomic<uint64_t> num_asked{0};
  std::atomic<uint64_t> num_over{0};
};

/// An interprocess event. Numbers are never used again.
struct SharedRecords {
  std::atomic<int> owner{0};  ///< process that made it
  std::atomic<bool> is_destroyed{false};
  Records records;
};

/// Memory of a device. Numbers and places are never used again.
struct SharedBlock {
  std::atomic<int> owner{0};
  std::atomic<bool> is_freed{false};
  std::atomic<int> num_opened{0};
  int device = 0;
  uint64_t offset = 0;  ///< in the file
  size_t size = 0;
};

struct SharedState {
  static constexpr int kMaxEvents = 4096;
  static constexpr int kMaxBlocks = 16384;
  static constexpr int kMaxDevices = 8;

  int num_devices = 0;
  int64_t device_bytes = 0;
  std::atomic<int> next_event{0};
  std::atomic<int> next_block{0};
  std::atomic<uint64_t> next_offset{0};
  std::array<std::atomic<int64_t>, kMaxDevices> bytes_in_use{};
  std::array<SharedRecords, kMaxEvents> events;
  std::array<SharedBlock, kMaxBlocks> blocks;
};

/// Returns the machine's state. Ends the process if there is no machine.
SharedState& shared();
int machine_file();

/// A piece of the file as this process has it, mapped twice: callers get
/// `begin`, which cannot be accessed, and streams use `view`.
struct Mapping {
  uint8_t* begin = nullptr;
  uint8_t* view = nullptr;
  size_t size = 0;

  explicit Mapping(const SharedBlock& block);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
};

size_t round_to_pages(size_t size);

/// Ends the process with a reason: the test itself is wrong.
[[noreturn]] void give_up(const char* why);

}  // namespace smp::fake_cuda
