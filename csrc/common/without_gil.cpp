#include "csrc/common/without_gil.h"

#include <atomic>

namespace smp {
namespace {

std::atomic<void (*)(const std::function<void()>&)> release_gil = nullptr;

}  // namespace

void without_gil(const std::function<void()>& body) {
  if (auto* release = release_gil.load()) return release(body);
  body();
}

void set_gil_release(void (*release)(const std::function<void()>& body)) {
  release_gil = release;
}

}  // namespace smp
