#pragma once

namespace smp::memory {

// Note [Heap of the host]
//
// The C library keeps freed blocks of up to 32 MB in its heap. When whole
// weights come and go there, among small objects that stay, it ends up with as
// many large holes as there were weights. `trim_heap` gives their pages back,
// but the holes stay, and later blocks wander from one to the next: each small
// object takes the begin of the smallest hole, for which the next large block
// is too large then. A process would grow by all of them again. So while
// weights are made and divided, large blocks are kept out of the heap.

/// Lets the C library give back all pages of the heap that are wholly free. For
/// moments when much has been freed for good: the next allocations are slower.
void trim_heap();

/// While one of them is alive, in any thread, blocks from 1 MiB on come from
/// the system one by one, and go back there as soon as they are freed. Does
/// nothing where the environment has settings for the heap of its own.
///
/// Afterwards the thresholds are those that the C library itself arrives at
/// once a block of 32 MB has been freed; it does not adapt them any more.
class MappedBlocks {
 public:
  MappedBlocks();
  ~MappedBlocks();
  MappedBlocks(const MappedBlocks&) = delete;
  MappedBlocks& operator=(const MappedBlocks&) = delete;
};

}  // namespace smp::memory
