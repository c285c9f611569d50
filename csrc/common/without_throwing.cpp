#include "csrc/common/without_throwing.h"

#include <exception>

#include "csrc/common/log.h"

namespace smp {
namespace {

// Errors of torch have a stack trace behind their first line.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

void log_current_exception(const char* what) noexcept {
  try {
    throw;
  } catch (const std::exception& error) {
    try {
      SMP_LOG(kWarning, what, " failed: ", first_line(error));
    } catch (...) {
      // No memory for the line.
    }
  } catch (...) {
    // Not ours, and without a text.
  }
}

}  // namespace smp
