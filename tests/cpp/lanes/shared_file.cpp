#include "tests/cpp/lanes/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "csrc/common/check.h"

namespace smp::lanes {
namespace {

DeviceMemory map_file(int fd, int64_t num_bytes) {
  const auto size = static_cast<size_t>(num_bytes);
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  SMP_CHECK(memory != MAP_FAILED, "cannot map ", num_bytes,
            " bytes of a lane of tests: ", std::strerror(errno));
  return {static_cast<uint8_t*>(memory),
          [size](uint8_t* mapped) { ::munmap(mapped, size); }};
}

health::OwnedFd make_memory(int64_t num_bytes) {
  health::OwnedFd fd(::memfd_create("smp-fake-lane", MFD_CLOEXEC));
  SMP_CHECK(fd && ::ftruncate(fd.get(), num_bytes) == 0, "cannot make ",
            num_bytes, " bytes of a lane of tests: ", std::strerror(errno));
  return fd;
}

}  // namespace

SharedFile::SharedFile(int64_t num_bytes)
    : num_bytes_(num_bytes),
      fd_(make_memory(num_bytes)),
      memory_(map_file(fd_.get(), num_bytes)) {}

std::string SharedFile::handle() const {
  std::ostringstream text;
  text << ::getpid() << ' ' << fd_.get() << ' ' << num_bytes_;
  return text.str();
}

DeviceMemory SharedFile::open(const std::string& handle) {
  std::istringstream text(handle);
  int64_t pid = 0;
  int64_t fd = 0;
  int64_t num_bytes = 0;
  SMP_CHECK(text >> pid >> fd >> num_bytes, "'", handle,
            "' is no handle of memory of a lane of tests");
  const std::string path = detail::concat("/proc/", pid, "/fd/", fd);
  const health::OwnedFd opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  SMP_CHECK(opened, "cannot open ", path, ": ", std::strerror(errno));
  return map_file(opened.get(), num_bytes);
}

}  // namespace smp::lanes
