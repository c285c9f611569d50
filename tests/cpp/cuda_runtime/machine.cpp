#include "tests/cpp/cuda_runtime/machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>

namespace smp::fake_cuda {
namespace {

constexpr size_t kFileBytes = size_t{1} << 40;  // of which pages in use exist

SharedState* the_state = nullptr;
int the_file = -1;

void* map_file(size_t size, int access, uint64_t offset) {
  void* const begin = ::mmap(nullptr, size, access, MAP_SHARED, the_file,
                             static_cast<off_t>(offset));
  if (begin == MAP_FAILED) give_up("the system maps no memory");
  return begin;
}

}  // namespace

void give_up(const char* why) {
  std::fprintf(stderr, "stand-in for CUDA: %s\n", why);
  std::abort();
}

size_t round_to_pages(size_t size) { return (size + 4095) / 4096 * 4096; }

Machine::Machine(MachineOptions options) {
  if (the_state != nullptr) give_up("one machine at a time");
  if (options.num_devices > SharedState::kMaxDevices) give_up("devices");
  the_file = ::memfd_create("smp-fake-cuda", MFD_CLOEXEC);
  if (the_file < 0 || ::ftruncate(the_file, kFileBytes) != 0) {
    give_up("the system makes no file");
  }
  void* const begin = map_file(sizeof(SharedState), PROT_READ | PROT_WRITE, 0);
  the_state = new (begin) SharedState;
  the_state->num_devices = options.num_devices;
  the_state->device_bytes = options.device_bytes;
  the_state->next_offset = round_to_pages(sizeof(SharedState));
}

Machine::~Machine() {
  ::munmap(the_state, sizeof(SharedState));
  ::close(the_file);
  the_state = nullptr;
  the_file = -1;
}

SharedState& shared() {
  if (the_state == nullptr) give_up("a call without a machine");
  return *the_state;
}

int machine_file() { return the_file; }

Mapping::Mapping(const SharedBlock& block)
    : begin(static_cast<uint8_t*>(
          map_file(round_to_pages(block.size), PROT_NONE, block.offset))),
      view(static_cast<uint8_t*>(map_file(
          round_to_pages(block.size), PROT_READ | PROT_WRITE, block.offset))),
      size(block.size) {}

// The caller's addresses are not used for anything else.
Mapping::~Mapping() { ::munmap(view, round_to_pages(size)); }

}  // namespace smp::fake_cuda
