#pragma once

#include <cstddef>
#include <cstdint>

// Another stack for what the calling thread does next. Fibers change places
// some million times in the tests, so a switch must not be a system call, which
// those of ucontext are: they serve where there is no switch of our own.

#if defined(__x86_64__) && !defined(SMP_FIBERS_OF_UCONTEXT)

namespace smp::kernels::emulated {

/// Place where a stack goes on.
using Place = void*;

extern "C" void smp_switch_stack(void** from, void* to);

inline void switch_to(Place* from, Place* to) { smp_switch_stack(from, *to); }

/// Prepares an empty stack on which `entry`, which does not return, begins.
inline void begin_at(Place* place, char* stack, size_t bytes, void (*entry)()) {
  const auto end = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<uintptr_t*>(end) - 8;
  for (int i = 0; i < 8; ++i) words[i] = 0;  // registers, no caller
  words[6] = reinterpret_cast<uintptr_t>(entry);
  *place = words;
}

}  // namespace smp::kernels::emulated

#else

#include <ucontext.h>

namespace smp::kernels::emulated {

using Place = ucontext_t;

inline void switch_to(Place* from, Place* to) { swapcontext(from, to); }

inline void begin_at(Place* place, char* stack, size_t bytes, void (*entry)()) {
  getcontext(place);
  place->uc_stack.ss_sp = stack;
  place->uc_stack.ss_size = bytes;
  place->uc_link = nullptr;
  makecontext(place, entry, 0);
}

}  // namespace smp::kernels::emulated

#endif
