#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/topology/shard_interval.h"

namespace smp::gradients {

/// The ranks over which the gradient of a parameter is summed.
enum class ReductionGroup { kDp, kRdp };

/// A parameter that this rank holds, described for all code that reduces it.
/// Made once after partition, in one order on all ranks of the reduction group.
struct ParameterRecord {
  int index = -1;              ///< position in the list of records
  std::string name;            ///< in the whole model
  std::vector<int64_t> shape;  ///< of the whole parameter
  c10::ScalarType dtype = c10::ScalarType::Float;
  /// Dtype in which gradients are added up and reduced; not narrower than
  /// `dtype`.
  c10::ScalarType accumulation_dtype = c10::ScalarType::Float;
  topology::ShardInterval interval;  ///< the slice held here
  std::vector<std::string> ties;     ///< other names of the same parameter
  ReductionGroup group = ReductionGroup::kDp;
  double divisor = 1;  ///< of the summed gradient; dp size for a mean

  /// Returns the sizes of the slice held here.
  std::vector<int64_t> local_shape() const;
  int64_t local_numel() const;
  /// Returns one line with everything that must agree over the reduction group.
  std::string describe() const;
};

/// Returns a record of a parameter that is held whole, with gradients
/// accumulated in `dtype`.
ParameterRecord whole_record(int index, std::string name,
                             std::vector<int64_t> shape, c10::ScalarType dtype,
                             double divisor = 1);

}  // namespace smp::gradients
