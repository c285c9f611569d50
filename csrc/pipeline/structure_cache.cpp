#include "csrc/pipeline/structure_cache.h"

#include "csrc/common/check.h"

namespace smp::pipeline {

std::pair<int64_t, bool> StructureCache::on_send(int peer,
                                                 const std::string& bytes) {
  if (bytes.empty() || bytes.size() > kMaxBytes) return {0, true};
  std::lock_guard<std::mutex> lock(mutex_);
  Sent& known = sent_[peer];
  const auto found = known.ids.find(bytes);
  if (found != known.ids.end()) return {found->second, false};
  known.num_bytes += bytes.size();
  if (known.ids.size() >= kMaxPerPeer || known.num_bytes > kMaxBytesPerPeer) {
    return {0, true};
  }
  const int64_t id = static_cast<int64_t>(known.ids.size()) + 1;
  known.ids.emplace(bytes, id);
  return {id, true};
}

std::string StructureCache::on_receive(int peer, int64_t id,
                                       std::string bytes) {
  if (id == 0) return bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!bytes.empty()) {
    received_[{peer, id}] = bytes;
    return bytes;
  }
  const auto found = received_.find({peer, id});
  SMP_CHECK(found != received_.end(), "structure ", id, " of global_rank ",
            peer, " is unknown here; the message stream is damaged");
  return found->second;
}

}  // namespace smp::pipeline
