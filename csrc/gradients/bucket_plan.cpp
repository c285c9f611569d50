#include "csrc/gradients/bucket_plan.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "csrc/common/check.h"

namespace smp::gradients {

namespace {

void check_records(const std::vector<ParameterRecord>& records) {
  std::unordered_set<std::string_view> names;
  for (size_t i = 0; i < records.size(); ++i) {
    const ParameterRecord& record = records[i];
    SMP_CHECK_VALUE(record.index == static_cast<int>(i), "parameter record ", i,
                    " (", record.name, ") has index ", record.index,
                    "; records are listed in the order of their indices");
    SMP_CHECK_VALUE(names.insert(record.name).second, "parameter ", record.name,
                    " has two records; list a tied parameter once");
    SMP_CHECK_VALUE(record.divisor > 0, "parameter ", record.name,
                    " has divisor ", record.divisor, "; expected > 0");
    SMP_CHECK_VALUE(c10::elementSize(record.accumulation_dtype) >=
                        c10::elementSize(record.dtype),
                    "gradients of parameter ", record.name, " of dtype ",
                    record.dtype, " cannot be accumulated in ",
                    record.accumulation_dtype, ", which is narrower");
  }
}

}  // namespace

int64_t slot_alignment(c10::ScalarType dtype) {
  return kSlotAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

BucketPlan plan_buckets(const std::vector<ParameterRecord>& records,
                        int64_t cap_bytes) {
  SMP_CHECK_VALUE(cap_bytes > 0, "bucket size must be > 0 bytes, got ",
                  cap_bytes);
  check_records(records);

  using Key =
      std::tuple<c10::ScalarType, c10::ScalarType, ReductionGroup, double>;
  std::map<Key, Bucket> open;
  BucketPlan plan;
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    const auto item_bytes =
        static_cast<int64_t>(c10::elementSize(record->accumulation_dtype));
    const int64_t alignment = slot_alignment(record->dtype);
    const int64_t numel = record->local_numel();
    const int64_t room = (numel + alignment - 1) / alignment * alignment;
    Bucket& bucket = open[{record->dtype, record->accumulation_dtype,
                           record->group, record->divisor}];
    if (!bucket.slots.empty() &&
        (bucket.numel + room) * item_bytes > cap_bytes) {
      plan.buckets.push_back(std::exchange(bucket, {}));
    }
    if (bucket.slots.empty()) {
      bucket.dtype = record->dtype;
      bucket.accumulation_dtype = record->accumulation_dtype;
      bucket.group = record->group;
      bucket.divisor = record->divisor;
    }
    bucket.slots.push_back({record->index, bucket.numel, numel});
    bucket.numel += room;
  }
  for (auto& [key, bucket] : open) plan.buckets.push_back(std::move(bucket));
  std::sort(plan.buckets.begin(), plan.buckets.end(),
            [](const Bucket& a, const Bucket& b) {
              return a.slots.back().record_idx > b.slots.back().record_idx;
            });

  plan.places.resize(records.size());
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      plan.places[slots[s].record_idx] = {static_cast<int>(b),
                                          static_cast<int>(s)};
    }
  }
  return plan;
}

}  // namespace smp::gradients
