#include "csrc/kernels/multi_array.h"

// Stands in for cuda/ where there is no CUDA compiler.

namespace smp::kernels::cuda {

namespace {

constexpr const char* kNoCuda =
    "this build of smp has no CUDA kernels; rebuild with nvcc on PATH and "
    "SMP_CUDA=on, or keep the tensors on the CPU";

}  // namespace

int64_t num_partial_sums(const Array*, int64_t) { return 0; }

const char* sum_of_squares(const Array*, int64_t, double*, double*, void*) {
  return kNoCuda;
}

const char* scale(const Array*, int64_t, const double*, void*) {
  return kNoCuda;
}

const char* add_scaled(const ArrayPair*, int64_t, double, void*) {
  return kNoCuda;
}

}  // namespace smp::kernels::cuda
