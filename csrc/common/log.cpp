#include "csrc/common/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "csrc/common/env.h"

namespace smp {
namespace {

constexpr std::array<const char*, 5> kLevelNames = {"debug", "info", "warning",
                                                    "error", "off"};

LogLevel level_from_env() {
  const std::string name = env_string("SMP_LOG_LEVEL").value_or("warning");
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (name == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  SMP_CHECK_VALUE(false,
                  "environment variable SMP_LOG_LEVEL must be debug, info, "
                  "warning, error or off; got '",
                  name, "'");
  return LogLevel::kWarning;
}

std::atomic<LogLevel>& level_of_process() {
  static std::atomic<LogLevel> level = level_from_env();
  return level;
}

}  // namespace

LogLevel log_level() {
  return level_of_process().load(std::memory_order_relaxed);
}

void set_log_level(LogLevel level) { level_of_process() = level; }

void log_line(LogLevel level, const std::string& text) {
  const std::string line =
      detail::concat(rank_prefix(), "smp ",
                     kLevelNames[static_cast<size_t>(level)], ": ", text, "\n");
  const char* data = line.data();
  size_t left = line.size();
  while (left > 0) {
    const ssize_t written = ::write(STDERR_FILENO, data, left);
    if (written <= 0) return;  // nobody to tell
    data += written;
    left -= static_cast<size_t>(written);
  }
}

}  // namespace smp
