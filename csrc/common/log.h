#pragma once

#include <string>

#include "csrc/common/check.h"

namespace smp {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// Returns the level below which lines are dropped. Starts as SMP_LOG_LEVEL
/// (debug, info, warning, error or off), or warning.
LogLevel log_level();
void set_log_level(LogLevel level);

/// Writes one line to stderr in a single call, so that the lines of several
/// ranks never mix: `"[global_rank 1 | pp 0] smp warning: text"`.
void log_line(LogLevel level, const std::string& text);

/// Names the file for texts that are too long for a terminal; an empty name:
/// there is none. `log_details` appends to it.
void set_details_file(std::string path);

/// Appends `text` to the file of details, and logs its first line with the name
/// of the file. Without a file, or if the file cannot be written, logs all of
/// it.
void log_details(LogLevel level, const std::string& text);

}  // namespace smp

/// SMP_LOG(kInfo, "bucket ", i, " is complete"); arguments are evaluated only
/// when the line is printed.
#define SMP_LOG(level, ...)                                          \
  do {                                                               \
    if (::smp::LogLevel::level >= ::smp::log_level()) [[unlikely]] { \
      ::smp::log_line(::smp::LogLevel::level,                        \
                      ::smp::detail::concat(__VA_ARGS__));           \
    }                                                                \
  } while (false)
