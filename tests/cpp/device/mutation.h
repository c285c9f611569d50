#pragma once

#include <cstdlib>
#include <cstring>

namespace smp::testing {

/// Returns whether SMP_TEST_MUTATION has this name (tests/device/mutations.py).
inline bool is_mutated(const char* name) {
  static const char* const chosen = std::getenv("SMP_TEST_MUTATION");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}

}  // namespace smp::testing
