#include "csrc/pipeline/operation.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

struct Case {
  const char* name;
  bool with_scalar;
  double scalar;
  std::vector<double> expected;
};

TEST(Operation, computes_what_its_name_says_also_after_its_journey) {
  const at::Tensor a = at::tensor({1.0, 2.0}, at::kDouble);
  const at::Tensor b = at::tensor({10.0, 30.0}, at::kDouble);
  const std::vector<Case> cases = {
      {"add", false, 1, {11, 32}},   {"add", false, 0.5, {6, 17}},
      {"sub", false, 1, {-9, -28}},  {"sub", false, 2, {-19, -58}},
      {"mul", false, 1, {10, 60}},   {"mul", true, 3, {3, 6}},
      {"div", true, 4, {0.25, 0.5}}, {"neg", false, 1, {-1, -2}},
  };
  for (const Case& one : cases) {
    const Operation operation = Operation::decode(
        Operation::named(one.name, one.with_scalar, one.scalar).encode());
    std::vector<at::Tensor> inputs = {a, b};
    inputs.resize(operation.num_tensors());
    EXPECT_TRUE(
        at::equal(operation.run(inputs),
                  at::tensor(at::ArrayRef<double>(one.expected), at::kDouble)))
        << one.name << " " << one.scalar;
  }
}

TEST(Operation, a_number_keeps_the_dtype) {
  const at::Tensor a = at::tensor({1.0, 2.0}, at::kFloat);
  for (const char* name : {"mul", "div"}) {
    EXPECT_EQ(Operation::named(name, true, 3).run({a}).scalar_type(),
              at::kFloat);
  }
}

TEST(Operation, a_wrong_number_of_tensors_and_unknown_names_are_our_bugs) {
  const at::Tensor a = at::tensor({1.0}, at::kDouble);
  EXPECT_THROW(Operation::named("add", false, 1).run({a}), InternalError);
  EXPECT_THROW(Operation::named("neg", false, 1).run({a, a}), InternalError);
  EXPECT_THROW(Operation::named("pow", false, 1), InternalError);
}

TEST(Operation, damaged_bytes_are_an_error) {
  const std::string good = Operation::named("add", false, 1).encode();
  EXPECT_THROW(Operation::decode(""), Error);
  EXPECT_THROW(Operation::decode(good.substr(1)), Error);
  EXPECT_THROW(Operation::decode(good + "x"), Error);
  for (int code = 0; code < 256; ++code) {
    std::string bytes = good;
    bytes[0] = static_cast<char>(code);
    if (code <= 5) {
      EXPECT_EQ(Operation::decode(bytes).encode(), bytes);
    } else {
      EXPECT_THROW(Operation::decode(bytes), Error) << code;
    }
  }
}

}  // namespace
}  // namespace smp::pipeline
