#include "csrc/pipeline/operation.h"

#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sub.h>
#include <c10/core/Scalar.h>

#include <cstring>

#include "csrc/common/check.h"

namespace smp::pipeline {

int Operation::num_tensors() const {
  return code == Code::kAdd || code == Code::kSub || code == Code::kMul ? 2 : 1;
}

at::Tensor Operation::run(const std::vector<at::Tensor>& tensors) const {
  SMP_ASSERT(static_cast<int>(tensors.size()) == num_tensors(),
             "an operation got ", tensors.size(), " tensors");
  switch (code) {
    case Code::kAdd:
      return at::add(tensors[0], tensors[1], scalar);
    case Code::kSub:
      return at::sub(tensors[0], tensors[1], scalar);
    case Code::kMul:
      return at::mul(tensors[0], tensors[1]);
    case Code::kMulScalar:
      return at::mul(tensors[0], scalar);
    case Code::kDivScalar:
      return at::div(tensors[0], scalar);
    case Code::kNeg:
      return at::neg(tensors[0]);
  }
  SMP_ASSERT(false, "unknown operation");
  return {};
}

std::string Operation::encode() const {
  std::string bytes(1, static_cast<char>(code));
  bytes.append(reinterpret_cast<const char*>(&scalar), sizeof scalar);
  return bytes;
}

Operation Operation::decode(const std::string& bytes) {
  SMP_CHECK(bytes.size() == 1 + sizeof(double), "a damaged operation");
  SMP_CHECK(bytes[0] >= 0 && bytes[0] <= static_cast<char>(Code::kNeg),
            "unknown operation ", int{bytes[0]});
  Operation operation;
  operation.code = static_cast<Code>(bytes[0]);
  std::memcpy(&operation.scalar, bytes.data() + 1, sizeof(double));
  return operation;
}

Operation Operation::named(const std::string& name, bool with_scalar,
                           double scalar) {
  if (name == "add") return {Code::kAdd, scalar};
  if (name == "sub") return {Code::kSub, scalar};
  if (name == "mul" && !with_scalar) return {Code::kMul, 1};
  if (name == "mul") return {Code::kMulScalar, scalar};
  if (name == "div") return {Code::kDivScalar, scalar};
  SMP_ASSERT(name == "neg", "no operation is named ", name);
  return {Code::kNeg, 1};
}

}  // namespace smp::pipeline
