#include "csrc/comm/reduce_into.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>

namespace smp::comm {

void reduce_into(const at::Tensor& to, const at::Tensor& from, ReduceOp op) {
  for (int64_t begin = 0; begin < to.numel(); begin += kReduceElements) {
    const int64_t count = std::min(kReduceElements, to.numel() - begin);
    at::Tensor sum = to.narrow(0, begin, count);
    const at::Tensor other = from.narrow(0, begin, count);
    switch (op) {
      case ReduceOp::kSum:
        sum.add_(other);
        break;
      case ReduceOp::kMax:
        at::maximum_out(sum, sum, other);
        break;
      case ReduceOp::kMin:
        at::minimum_out(sum, sum, other);
        break;
    }
  }
}

}  // namespace smp::comm
