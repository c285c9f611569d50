#pragma once

#include <cstdint>
#include <string>

#include "csrc/health/fork_guard.h"
#include "csrc/lanes/device_copies.h"

namespace smp::lanes {

/// Memory of the host that other processes of the user can map: what lanes of
/// tests are made of. New memory is zero.
class SharedFile {
 public:
  /// @throws Error when the system has no room
  explicit SharedFile(int64_t num_bytes);

  const DeviceMemory& memory() const { return memory_; }
  /// Opens it in another process, or in this one, while this object lives.
  std::string handle() const;
  /// @throws Error for what is no handle, or of a process that is gone
  static DeviceMemory open(const std::string& handle);

 private:
  int64_t num_bytes_;
  health::OwnedFd fd_;
  DeviceMemory memory_;
};

}  // namespace smp::lanes
