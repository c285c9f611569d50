#pragma once

#include <cstddef>
#include <cstdint>

// Watches the accesses of kernels to memory. The kernels are compiled with
// calls before each access, as for the thread sanitizer, whose runtime this
// replaces: threads of a block are fibers of one thread, so all that orders
// their accesses is a barrier of the block. An exchange in a warp orders
// registers only, as on a device. Blocks are ordered by the end of a launch.

namespace smp::kernels::emulated {

/// Names a variable that the threads of a block share. `host_sources.py` writes
/// one behind each `__shared__`.
class Shared {
 public:
  Shared(const char* name, const void* data, size_t bytes);
};

/// Two accesses that nothing orders, of which one writes; or a read of shared
/// memory that the block has not written.
struct Race {
  enum Kind { kInBlock, kBetweenBlocks, kUnwritten };
  Kind kind;
  const char* name;  // of the shared variable; null: memory of the device
  uintptr_t address;
  size_t offset;  // in the shared variable
  int thread;     // in the block
  bool is_write;
  int other_thread;
  bool is_other_write;
};

/// Receives each race. Defined beside the scheduler.
void report_race(const Race& race);

/// Called by the scheduler. Each begins a time that orders accesses.
void watch_launch();
void watch_block();
void watch_barrier();

/// Accesses belong to this thread of the block until `unwatch`. Its stack is
/// its own.
void watch_thread(int thread, const char* stack, size_t stack_bytes);
void unwatch();

}  // namespace smp::kernels::emulated
