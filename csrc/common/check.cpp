#include "csrc/common/check.h"

#include <mutex>
#include <utility>

namespace smp {
namespace {

struct Prefix {
  std::mutex mutex;
  std::string text;
};

// The prefix is never destroyed: threads may still report while the process
// exits.
Prefix& process_prefix() {
  static Prefix& prefix = *new Prefix;
  return prefix;
}

}  // namespace

std::string rank_prefix() {
  Prefix& prefix = process_prefix();
  const std::lock_guard lock(prefix.mutex);
  return prefix.text;
}

void set_rank_prefix(std::string text) {
  Prefix& prefix = process_prefix();
  const std::lock_guard lock(prefix.mutex);
  prefix.text = std::move(text);
}

}  // namespace smp
