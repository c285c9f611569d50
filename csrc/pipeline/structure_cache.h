#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace smp::pipeline {

/// Remembers which structures (pickled arguments without their tensors) each
/// peer has seen, so that a structure travels once and its id afterwards.
/// Thread-safe. Peers are global ranks.
class StructureCache {
 public:
  /// Structures above this size, and those after the limit of a peer is
  /// reached, are always sent whole: a changing integer in the arguments must
  /// not fill the memory of both sides.
  static constexpr size_t kMaxBytes = 65536;
  static constexpr size_t kMaxBytesPerPeer = 8 << 20;
  static constexpr size_t kMaxPerPeer = 1024;

  /// @return the id to send (0: not kept) and whether the bytes must go along.
  std::pair<int64_t, bool> on_send(int peer, const std::string& bytes);

  /// @return the structure that `id` and `bytes` of a message mean.
  /// @throws Error when `id` was never announced by `peer`
  std::string on_receive(int peer, int64_t id, std::string bytes);

 private:
  struct PairHash {
    size_t operator()(const std::pair<int, int64_t>& key) const {
      return std::hash<int64_t>()(key.second * 31 + key.first);
    }
  };

  struct Sent {
    std::unordered_map<std::string, int64_t> ids;
    size_t num_bytes = 0;
  };

  std::mutex mutex_;
  std::unordered_map<int, Sent> sent_;
  std::unordered_map<std::pair<int, int64_t>, std::string, PairHash> received_;
};

}  // namespace smp::pipeline
