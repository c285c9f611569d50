#pragma once

// The kernels in this folder are compiled once per instruction set, each time
// into a namespace of its own (SMP_ISA), by cpu/fused_<isa>.cpp. Everything in
// them is inlined or in that namespace: a function shared with other files
// could be linked from here into programs for older processors. For the same
// reason they use no part of the standard library.

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SMP_VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SMP_VECTOR_BYTES 32
#else
#define SMP_VECTOR_BYTES 16
#endif

#ifndef SMP_ISA
#define SMP_ISA portable
#endif

#define SMP_INLINE inline __attribute__((always_inline))
