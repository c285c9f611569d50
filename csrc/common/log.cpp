#include "csrc/common/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <utility>

namespace smp {
namespace {

constexpr std::array<const char*, 5> kLevelNames = {"debug", "info", "warning",
                                                    "error", "off"};

LogLevel level_from_env() {
  const char* const text = std::getenv("SMP_LOG_LEVEL");
  const std::string name = text == nullptr || *text == 0 ? "warning" : text;
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (name == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  SMP_CHECK_VALUE(false,
                  "environment variable SMP_LOG_LEVEL must be debug, info, "
                  "warning, error or off; got '",
                  name, "'");
  return LogLevel::kWarning;
}

struct DetailsFile {
  std::mutex mutex;
  std::string path;
};

DetailsFile& details_file() {
  static DetailsFile file;
  return file;
}

// Returns whether the whole text was written.
bool write_all(int fd, const std::string& text) {
  const char* data = text.data();
  size_t left = text.size();
  while (left > 0) {
    const ssize_t written = ::write(fd, data, left);
    if (written <= 0) return false;
    data += written;
    left -= static_cast<size_t>(written);
  }
  return true;
}

bool append(const std::string& path, const std::string& text) {
  if (path.empty()) return false;
  const int fd =
      ::open(path.c_str(),
             O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return false;
  const bool is_written = write_all(fd, text);
  ::close(fd);
  return is_written;
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
  write_all(STDERR_FILENO, line);  // fails if no process reads stderr
}

void set_details_file(std::string path) {
  std::lock_guard lock(details_file().mutex);
  details_file().path = std::move(path);
}

void log_details(LogLevel level, const std::string& text) {
  std::string path;
  {
    std::lock_guard lock(details_file().mutex);
    path = details_file().path;
  }
  if (!append(path, "==== " + rank_prefix() + text + "\n")) {
    return log_line(level, text);
  }
  log_line(level, text.substr(0, text.find('\n')) + " " + path);
}

}  // namespace smp
