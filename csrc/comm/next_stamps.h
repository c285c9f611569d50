#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

namespace smp::comm {

/// The stamps that threads have set for their next collectives; see
/// `Communicator::stamp_next`. Thread-safe.
class NextStamps {
 public:
  void set(uint64_t stamp) {
    const std::lock_guard lock(mutex_);
    stamps_[std::this_thread::get_id()] = stamp;
  }

  /// Returns the stamp of the calling thread once; 0: none is set.
  uint64_t take() {
    const std::lock_guard lock(mutex_);
    const auto found = stamps_.find(std::this_thread::get_id());
    if (found == stamps_.end()) return 0;
    return stamps_.extract(found).mapped();
  }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, uint64_t> stamps_;
};

}  // namespace smp::comm
