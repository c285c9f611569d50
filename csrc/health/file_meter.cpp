#include "csrc/health/file_meter.h"

#include <fstream>
#include <string>

namespace smp::health {
namespace {

constexpr int64_t kTransferBytes = 64 << 10;

// Returns the number of bytes that this process has read and written.
int64_t transferred_bytes() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t value = 0;
  int64_t now = 0;
  while (file >> name >> value) {
    if (name == "rchar:" || name == "wchar:") now += value;
  }
  return now;
}

}  // namespace

void FileMeter::leave_out(const std::function<void()>& work) {
  const int64_t before = transferred_bytes();
  work();
  if (seen_ >= 0) seen_ += transferred_bytes() - before;
}

int64_t FileMeter::read() {
  const int64_t now = transferred_bytes();
  if (seen_ >= 0 && now - seen_ >= kTransferBytes) num_bytes_ += now - seen_;
  seen_ = now;
  return num_bytes_;
}

}  // namespace smp::health
