#include "csrc/health/process_words.h"

#include <filesystem>
#include <fstream>
#include <system_error>

namespace smp::health {
namespace {

std::string state_words(char state, const std::string& number) {
  switch (state) {
    case 'T':
      return "is stopped; kill -CONT " + number + " lets it go on";
    case 't':
      return "is stopped by a debugger";
    case 'D':
      return "waits in the system for a device or a file";
    case 'Z':
    case 'X':
      return "has ended, and its parent has not looked";
    case 'R':
      return "runs";
    default:
      return "sleeps";
  }
}

}  // namespace

std::string process_space() {
  std::string text;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, text);
  std::error_code error;
  const auto space = std::filesystem::read_symlink("/proc/self/ns/pid", error);
  return error || text.empty() ? std::string() : text + " " + space.string();
}

std::string process_words(int pid) {
  const std::string number = std::to_string(pid);
  std::ifstream file("/proc/" + number + "/stat");
  std::string line;
  // The line reads "71 (name) T ...", where the name may have parentheses and
  // spaces.
  if (!std::getline(file, line)) return {};
  const size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos || end_of_name + 2 >= line.size()) {
    return {};
  }
  return "process " + number + " " + state_words(line[end_of_name + 2], number);
}

}  // namespace smp::health
