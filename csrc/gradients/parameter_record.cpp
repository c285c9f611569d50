#include "csrc/gradients/parameter_record.h"

#include <functional>
#include <numeric>
#include <sstream>
#include <utility>

namespace smp::gradients {

namespace {

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

}  // namespace

std::vector<int64_t> ParameterRecord::local_shape() const {
  // A tensor without dims cannot be cut.
  return interval.is_whole() ? shape : topology::shard_shape(shape, interval);
}

int64_t ParameterRecord::local_numel() const { return product(local_shape()); }

std::string ParameterRecord::describe() const {
  std::ostringstream out;
  out << name << ": " << c10::toString(dtype) << '[';
  for (size_t i = 0; i < shape.size(); ++i) {
    out << (i == 0 ? "" : ", ") << shape[i];
  }
  out << ']';
  if (accumulation_dtype != dtype) {
    out << " accumulated in " << c10::toString(accumulation_dtype);
  }
  if (!interval.is_whole()) out << ", " << interval.describe();
  out << (group == ReductionGroup::kDp ? ", dp" : ", rdp") << " / " << divisor;
  return out.str();
}

ParameterRecord whole_record(int index, std::string name,
                             std::vector<int64_t> shape, c10::ScalarType dtype,
                             double divisor) {
  ParameterRecord record;
  record.index = index;
  record.name = std::move(name);
  record.dtype = record.accumulation_dtype = dtype;
  record.interval = topology::ShardInterval::whole(
      product(shape), topology::ShardInterval::kFlat);
  record.shape = std::move(shape);
  record.divisor = divisor;
  return record;
}

}  // namespace smp::gradients
