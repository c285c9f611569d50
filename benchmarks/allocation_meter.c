/* Counts the large memory blocks of a process, for a library that is preloaded
 * (see allocation_meter.py). Tensors on the CPU are such blocks, whichever
 * thread makes them; what Python objects take is below the thresholds. Memory
 * that comes from the system itself counts too, wholly, used or not. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static const size_t kThreshold = 32 * 1024;
static atomic_llong live_bytes;
static atomic_llong peak_bytes;

static void count(size_t size) {
  const long long live =
      atomic_fetch_add(&live_bytes, (long long)size) + (long long)size;
  long long peak = atomic_load(&peak_bytes);
  while (live > peak &&
         !atomic_compare_exchange_weak(&peak_bytes, &peak, live)) {
  }
}

static void *add(void *block) {
  if (!block) return block;
  const size_t size = malloc_usable_size(block);
  if (size >= kThreshold) count(size);
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

/* ---- memory of the system itself; the C library's own calls do not come by */

static const size_t kMappedThreshold = 2 * 1024 * 1024;

/* Private anonymous mappings that count, as far as they are still there. */
static struct {
  uintptr_t begin, end;
} mappings[4096];
static int num_mappings;
static pthread_mutex_t mappings_mutex = PTHREAD_MUTEX_INITIALIZER;

static void *note(void *begin, size_t size) {
  pthread_mutex_lock(&mappings_mutex);
  if (num_mappings < (int)(sizeof(mappings) / sizeof(mappings[0]))) {
    mappings[num_mappings].begin = (uintptr_t)begin;
    mappings[num_mappings++].end = (uintptr_t)begin + size;
    count(size);
  }
  pthread_mutex_unlock(&mappings_mutex);
  return begin;
}

void *mmap(void *wanted, size_t size, int access, int flags, int file,
           off_t offset) {
  void *const begin =
      (void *)syscall(SYS_mmap, wanted, size, access, flags, file, offset);
  const int kind = MAP_PRIVATE | MAP_ANONYMOUS;
  const int is_memory = (flags & kind) == kind && (access & PROT_WRITE) &&
                        !(flags & (MAP_FIXED | MAP_STACK | MAP_NORESERVE));
  if (begin == MAP_FAILED || !is_memory || size < kMappedThreshold) {
    return begin;
  }
  return note(begin, size);
}

void *mmap64(void *wanted, size_t size, int access, int flags, int file,
             off_t offset) {
  return mmap(wanted, size, access, flags, file, offset);
}

/* A begin, an end, or all of what counts. */
static void forget(uintptr_t begin, uintptr_t end) {
  for (int i = num_mappings - 1; i >= 0; --i) {
    if (end <= mappings[i].begin || begin >= mappings[i].end) continue;
    const uintptr_t first = begin > mappings[i].begin ? begin : mappings[i].begin;
    const uintptr_t last = end < mappings[i].end ? end : mappings[i].end;
    atomic_fetch_sub(&live_bytes, (long long)(last - first));
    if (first == mappings[i].begin) {
      mappings[i].begin = last;
    } else {
      mappings[i].end = first;
    }
    if (mappings[i].begin >= mappings[i].end) {
      mappings[i] = mappings[--num_mappings];
    }
  }
}

int munmap(void *begin, size_t size) {
  pthread_mutex_lock(&mappings_mutex);
  forget((uintptr_t)begin, (uintptr_t)begin + size);
  const int result = (int)syscall(SYS_munmap, begin, size);
  pthread_mutex_unlock(&mappings_mutex);
  return result;
}

long long smp_meter_live(void) { return atomic_load(&live_bytes); }

long long smp_meter_peak(void) { return atomic_load(&peak_bytes); }

/* The peak is that of the time from now on. */
void smp_meter_reset(void) {
  atomic_store(&peak_bytes, atomic_load(&live_bytes));
}
