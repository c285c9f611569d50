#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Runs the threads of a CUDA block one after the other, as fibers of the
// calling thread: a barrier and an exchange within a warp give the processor to
// the next thread. What is wrong with a launch is kept as an error, as the
// CUDA runtime does: a barrier or an exchange that not all threads reach
// together, a grid that is not permitted, a race.

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

/// In which order threads, warps and blocks run between barriers. A random
/// order changes from barrier to barrier.
enum class Order { kForward, kBackward, kRandom };

/// Launches have an order as long as this lives; a seed makes a random one.
class InOrder {
 public:
  explicit InOrder(Order order, unsigned seed = 1);
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
bool operator==(const Site& a, const Site& b);

/// Threads pass the barrier of this place as long as this lives, as if it were
/// not in the sources.
class WithoutBarrier {
 public:
  explicit WithoutBarrier(Site site);
  ~WithoutBarrier();
  WithoutBarrier(const WithoutBarrier&) = delete;
  WithoutBarrier& operator=(const WithoutBarrier&) = delete;
};

/// Returns the places of the barriers that blocks have passed since the last
/// call.
std::vector<Site> take_barriers();

/// Number of this thread in its warp.
int lane();

void wait_for_block(Site site);

/// @return the `bits` that lane `source` gave
uint64_t exchange_in_warp(unsigned mask, uint64_t bits, int source, Site site);

/// @return a bit for each lane
unsigned vote_in_warp(unsigned mask, bool vote, Site site);

/// Runs kernel(arguments) once per thread. Statics of the kernel are memory
/// that the block shares. Errors begin with `name`.
void run(const char* name, dim3 blocks, dim3 threads, size_t shared_bytes,
         void (*kernel)(void*), void* arguments);

/// Launches a kernel. `kernel<<<blocks, threads, shared_bytes, stream>>>(...)`
/// becomes a call of this function.
template <typename Call>
void launch(const char* name, dim3 blocks, dim3 threads, size_t shared_bytes,
            void* /*stream*/, Call call) {
  run(
      name, blocks, threads, shared_bytes,
      [](void* c) { (*static_cast<Call*>(c))(); }, &call);
}

}  // namespace smp::kernels::emulated
