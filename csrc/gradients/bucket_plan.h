#pragma once

#include <cstdint>
#include <vector>

#include "csrc/gradients/parameter_record.h"

namespace smp::gradients {

/// The place of a parameter in the flat tensor of its bucket.
struct BucketSlot {
  int record_idx = -1;
  int64_t offset = 0;  ///< in elements, a multiple of kSlotAlignmentBytes
  int64_t numel = 0;
};

/// Parameters that are reduced by one operation.
struct Bucket {
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< of the parameters
  c10::ScalarType accumulation_dtype = c10::ScalarType::Float;
  ReductionGroup group = ReductionGroup::kDp;
  double divisor = 1;
  int64_t numel = 0;  ///< of the flat tensor, with the gaps
  std::vector<BucketSlot> slots;
};

/// Bucket and slot of a record.
struct SlotPlace {
  int bucket_idx = -1;
  int slot_idx = -1;
};

struct BucketPlan {
  std::vector<Bucket> buckets;
  std::vector<SlotPlace> places;  ///< by record index
};

/// Alignment that suits vector kernels and all transports.
inline constexpr int64_t kSlotAlignmentBytes = 256;
/// Returns that alignment in elements of the parameters; gradients are at least
/// as wide.
int64_t slot_alignment(c10::ScalarType dtype);

/// Lays records out in flat buckets: last parameter first, because backward
/// reaches it first; one dtype, accumulation dtype, reduction group and divisor
/// per bucket. Buckets are in the order in which their last gradient is
/// expected. Pure.
/// @param cap_bytes  a bucket is closed when its gradients would grow beyond
///                   this; a larger parameter gets a bucket of its own
/// @throws ValueError when an index, a name or the cap is unusable
BucketPlan plan_buckets(const std::vector<ParameterRecord>& records,
                        int64_t cap_bytes);

}  // namespace smp::gradients
