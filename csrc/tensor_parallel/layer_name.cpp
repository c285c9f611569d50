#include "csrc/tensor_parallel/layer_name.h"

#include <utility>

namespace smp::tensor_parallel {
namespace {

thread_local std::string name_here;

}  // namespace

std::string exchange_layer_name(std::string name) {
  return std::exchange(name_here, std::move(name));
}

const std::string& layer_name() { return name_here; }

}  // namespace smp::tensor_parallel
