#include "csrc/kernels/launchers.h"

#include <map>
#include <stdexcept>
#include <string>

namespace smp::kernels {
namespace {

constexpr int kCuda = 1;  // c10::DeviceType::CUDA

std::map<int, const Launchers*>& table() {
  static const Launchers of_cuda;
  static std::map<int, const Launchers*> by_type = {{kCuda, &of_cuda}};
  return by_type;
}

}  // namespace

const Launchers& launchers_of_type(int device_type) {
  const auto found = table().find(device_type);
  if (found == table().end()) {
    throw std::runtime_error("smp has no kernels for devices of type " +
                             std::to_string(device_type) +
                             "; use tensors on the CPU or on CUDA");
  }
  return *found->second;
}

void set_launchers(int device_type, const Launchers* launchers) {
  table()[device_type] = launchers;
}

}  // namespace smp::kernels
