#pragma once

#include <sys/types.h>

namespace smp::health {

/// Detects forked children. Threads do not survive a fork (into data loader
/// workers, for instance), so the child must neither use nor join objects with
/// threads.
class ForkGuard {
 public:
  ForkGuard();

  bool in_child() const;
  /// @throws Error naming `what` in a forked child.
  void check(const char* what) const;

 private:
  const pid_t pid_;
};

/// A file descriptor that is closed with the object, by exec, and in forked
/// children. A connection that a child still held open would hide the death of
/// its parent.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd);
  ~OwnedFd() { reset(); }
  OwnedFd(OwnedFd&& other) noexcept;
  OwnedFd& operator=(OwnedFd&& other) noexcept;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

}  // namespace smp::health
