/* Counts the large memory blocks of a process, for a library that is preloaded
 * (see allocation_meter.py). Tensors on the CPU are such blocks, whichever
 * thread makes them; what Python objects take is below the threshold. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static const size_t kThreshold = 32 * 1024;
static atomic_llong live_bytes;
static atomic_llong peak_bytes;

static void *add(void *block) {
  if (!block) return block;
  const size_t size = malloc_usable_size(block);
  if (size < kThreshold) return block;
  const long long live =
      atomic_fetch_add(&live_bytes, (long long)size) + (long long)size;
  long long peak = atomic_load(&peak_bytes);
  while (live > peak &&
         !atomic_compare_exchange_weak(&peak_bytes, &peak, live)) {
  }
  return block;
}

static void take(void *block) {
  if (!block) return;
  const size_t size = malloc_usable_size(block);
  if (size >= kThreshold) atomic_fetch_sub(&live_bytes, (long long)size);
}

void *malloc(size_t size) { return add(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) {
  return add(__libc_calloc(count, size));
}

void *realloc(void *block, size_t size) {
  take(block);
  void *const moved = __libc_realloc(block, size);
  if (!moved && size > 0) {
    add(block); /* it failed: the old one is still there */
    return moved;
  }
  return add(moved);
}

void *memalign(size_t alignment, size_t size) {
  return add(__libc_memalign(alignment, size));
}

void *aligned_alloc(size_t alignment, size_t size) {
  return add(__libc_memalign(alignment, size));
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  void *const made = __libc_memalign(alignment, size);
  if (!made) return ENOMEM;
  *block = add(made);
  return 0;
}

void free(void *block) {
  take(block);
  __libc_free(block);
}

long long smp_meter_live(void) { return atomic_load(&live_bytes); }

long long smp_meter_peak(void) { return atomic_load(&peak_bytes); }

/* The peak is that of the time from now on. */
void smp_meter_reset(void) {
  atomic_store(&peak_bytes, atomic_load(&live_bytes));
}
