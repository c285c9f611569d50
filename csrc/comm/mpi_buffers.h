#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <climits>
#include <cstdint>

#include "csrc/comm/communicator.h"
#include "csrc/comm/communicator_checks.h"
#include "csrc/common/check.h"

namespace smp::comm {

/// A tensor in the form that MPI takes.
struct Buffer {
  void* data;
  int count;
  MPI_Datatype type;
};

inline int checked_count(int64_t count, const CallName& call) {
  SMP_CHECK(count <= INT_MAX, call.text(), ": MPI takes at most ", INT_MAX,
            " elements in one call, got ", count, "; split the tensor");
  return static_cast<int>(count);
}

/// Returns the bytes in units of the element size, for moving.
inline Buffer buffer_to_move(const at::Tensor& tensor, const CallName& call) {
  void* data = tensor.data_ptr();
  const int64_t numel = tensor.numel();
  switch (tensor.element_size()) {
    case 1:
      return {data, checked_count(numel, call), MPI_UINT8_T};
    case 2:
      return {data, checked_count(numel, call), MPI_UINT16_T};
    case 4:
      return {data, checked_count(numel, call), MPI_UINT32_T};
    case 8:
      return {data, checked_count(numel, call), MPI_UINT64_T};
    default:
      return {data, checked_count(tensor.nbytes(), call), MPI_UINT8_T};
  }
}

/// Returns the elements in their type, for sums and comparisons.
inline Buffer buffer_to_reduce(const at::Tensor& tensor, const CallName& call) {
  auto type = [&] {
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return MPI_FLOAT;
      case at::kDouble:
        return MPI_DOUBLE;
      case at::kLong:
        return MPI_INT64_T;
      case at::kInt:
        return MPI_INT32_T;
      case at::kShort:
        return MPI_INT16_T;
      case at::kChar:
        return MPI_INT8_T;
      case at::kByte:
        return MPI_UINT8_T;
      default:
        throw Error(rank_prefix() + call.text() + ": MPI cannot reduce " +
                    describe_tensor(tensor) + "; convert it first");
    }
  }();
  return {tensor.data_ptr(), checked_count(tensor.numel(), call), type};
}

inline bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ||
         tensor.scalar_type() == at::kBFloat16;
}

inline MPI_Op to_mpi(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return MPI_SUM;
    case ReduceOp::kMax:
      return MPI_MAX;
    case ReduceOp::kMin:
      return MPI_MIN;
  }
  SMP_ASSERT(false, "reduce op ", static_cast<int>(op));
}

}  // namespace smp::comm
