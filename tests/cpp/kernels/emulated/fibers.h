#pragma once

#include <cstddef>
#include <cstdint>

// Runs the threads of a CUDA block one after the other, as fibers of the
// calling thread: a barrier and an exchange within a warp give the processor to
// the next thread. What is wrong with a launch is kept as an error, as the
// CUDA runtime does: a barrier or an exchange that not all threads reach
// together, a grid that is not permitted.

namespace smp::kernels::emulated {

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

/// Places and sizes of the thread that runs.
extern dim3 threadIdx;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

/// In which order threads, and blocks, run between barriers.
enum class Order { kForward, kBackward };

/// Launches have an order as long as this lives.
class InOrder {
 public:
  explicit InOrder(Order order);
  ~InOrder();
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  Order before_;
};

/// The text of the first launch since the last call that went wrong, or null.
const char* take_error();

/// Place of a barrier or an exchange in the sources.
struct Site {
  const char* file;
  int line;
};

/// Number of this thread in its warp.
int lane();

void wait_for_block(Site site);

/// @return the `bits` that lane `source` gave
uint64_t exchange_in_warp(unsigned mask, uint64_t bits, int source, Site site);

/// @return a bit for each lane
unsigned vote_in_warp(unsigned mask, bool vote, Site site);

/// Runs kernel(arguments) once per thread. Statics of the kernel are memory
/// that the block shares.
void run(dim3 blocks, dim3 threads, size_t shared_bytes, void (*kernel)(void*),
         void* arguments);

/// Launches a kernel. `kernel<<<blocks, threads, shared_bytes, stream>>>(...)`
/// becomes a call of this function.
template <typename Call>
void launch(dim3 blocks, dim3 threads, size_t shared_bytes, void* /*stream*/,
            Call call) {
  run(
      blocks, threads, shared_bytes,
      [](void* c) { (*static_cast<Call*>(c))(); }, &call);
}

}  // namespace smp::kernels::emulated
