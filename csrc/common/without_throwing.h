#pragma once

#include <utility>

namespace smp {

/// Logs the current exception as a warning. For handlers of code that cannot
/// raise.
/// @param what  words for what has failed, for instance "the end of a group"
void log_current_exception(const char* what) noexcept;

/// Runs `body`, and logs what it throws. For destructors and for the last
/// function of a thread, from which an exception would end the process.
template <typename Body>
void without_throwing(const char* what, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
  } catch (...) {
    log_current_exception(what);
  }
}

}  // namespace smp
