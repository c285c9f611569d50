#include "csrc/pipeline/call_record.h"

#include "csrc/common/check.h"

namespace smp::pipeline {

void CallRecords::put(Key key, CallRecord record) {
  std::lock_guard<std::mutex> lock(mutex_);
  records_[key] = std::move(record);
}

CallRecord CallRecords::take(Key key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = records_.find(key);
  SMP_CHECK(found != records_.end(), "call ", key.second, " of global_rank ",
            key.first,
            " has no graph here any more: its backward ran already. "
            "retain_graph is not supported; call model.backward once on the "
            "sum of the losses");
  CallRecord record = std::move(found->second);
  records_.erase(found);
  return record;
}

void CallRecords::drop_microbatch(int64_t mb) {
  std::map<Key, CallRecord> dropped;  // graphs are freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = records_.begin(); it != records_.end();) {
    if (it->second.mb == mb) {
      dropped.insert(records_.extract(it++));
    } else {
      ++it;
    }
  }
}

void CallRecords::clear() {
  std::map<Key, CallRecord> dropped;  // graphs are freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(records_);
}

int64_t CallRecords::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(records_.size());
}

}  // namespace smp::pipeline
