#include "csrc/health/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <utility>

#include "csrc/common/check.h"

namespace smp::health {
namespace {

struct OpenFds {
  std::mutex mutex;  // held across fork, so that the child sees a whole set
  std::set<int> fds;
};

// Never destroyed: descriptors may be closed during static destruction.
OpenFds& open_fds() {
  static OpenFds* const open = new OpenFds;
  return *open;
}

void close_in_child() {
  for (const int fd : open_fds().fds) ::close(fd);
  open_fds().fds.clear();
  open_fds().mutex.unlock();
}

void register_fork_handlers() {
  static const bool done = [] {
    open_fds();
    pthread_atfork([] { open_fds().mutex.lock(); },
                   [] { open_fds().mutex.unlock(); }, close_in_child);
    return true;
  }();
  (void)done;
}

}  // namespace

ForkGuard::ForkGuard() : pid_(::getpid()) {}

bool ForkGuard::in_child() const { return ::getpid() != pid_; }

void ForkGuard::check(const char* what) const {
  SMP_CHECK(!in_child(), what, " belongs to process ", pid_,
            " and cannot be used in process ", ::getpid(),
            ", which was forked from it; do this in the parent, or start the "
            "child with the spawn method");
}

OwnedFd::OwnedFd(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
  register_fork_handlers();
  std::lock_guard lock(open_fds().mutex);
  open_fds().fds.insert(fd_);
}

OwnedFd::OwnedFd(OwnedFd&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void OwnedFd::reset() {
  if (fd_ < 0) return;
  std::lock_guard lock(open_fds().mutex);
  // A descriptor missing from the set was closed by a forked child, and its
  // number may belong to another file now.
  if (open_fds().fds.erase(fd_) > 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace smp::health
