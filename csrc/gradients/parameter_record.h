#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/topology/shard_interval.h"

namespace smp::gradients {

/// Over which ranks the gradient of a parameter is summed.
enum class ReductionGroup { kDp, kRdp };

/// What everybody needs to know about a parameter that this rank holds. Made
/// once after partition, in one order on all ranks of the reduction group.
struct ParameterRecord {
  int index = -1;              ///< position in the list of records
  std::string name;            ///< in the whole model
  std::vector<int64_t> shape;  ///< of the whole parameter
  c10::ScalarType dtype = c10::ScalarType::Float;
  /// In which gradients are added up and reduced; not narrower than `dtype`.
  c10::ScalarType accumulation_dtype = c10::ScalarType::Float;
  topology::ShardInterval interval;  ///< the slice held here
  std::vector<std::string> ties;     ///< other names of the same parameter
  ReductionGroup group = ReductionGroup::kDp;
  double divisor = 1;  ///< of the summed gradient; dp size for a mean

  /// Sizes of the slice held here.
  std::vector<int64_t> local_shape() const;
  int64_t local_numel() const;
  /// One line that says all that must agree over the reduction group.
  std::string describe() const;
};

/// A record of a parameter that is held whole, its gradients accumulated in
/// `dtype`.
ParameterRecord whole_record(int index, std::string name,
                             std::vector<int64_t> shape, c10::ScalarType dtype,
                             double divisor = 1);

}  // namespace smp::gradients
