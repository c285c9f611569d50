#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace smp::health {

/// A collective, numbered in the same way by all ranks of its group.
struct CollectiveId {
  uint64_t group = 0;      ///< equal on the ranks of the group only
  int64_t sequence = 0;    ///< among the collectives of the group, from 1
  uint64_t signature = 0;  ///< hash of the call and its number of bytes
  int64_t num_bytes = 0;   ///< bytes this rank sends or receives, the larger
  std::vector<int> ranks = {};  ///< global ranks of the group
  bool goes_on_alone = true;    ///< goes on while none of its ranks waits
};

/// The collectives that this process has entered (issued), by group. The logs
/// of all ranks together show whether every rank of a collective has entered
/// it, with the same call. Thread-safe.
class CollectiveLog {
 public:
  /// Number of latest calls of a group that can be compared with other ranks.
  static constexpr size_t kNumSignatures = 8;

  /// Sets the sequence number of `id`, the next collective of `id.group`.
  void enter(CollectiveId& id);

  /// The log of one rank, in the form sent to other ranks.
  struct State {
    struct Group {
      uint64_t group = 0;
      int64_t num_entered = 0;
      /// Signature of call n is at n % kNumSignatures.
      std::array<uint64_t, kNumSignatures> signatures = {};
    };

    std::optional<CollectiveId> waits_for;
    std::vector<Group> groups;

    /// Encodes the state. The ranks of `waits_for` are sorted by this.
    std::string encode() const;
    /// Decodes a state. Returns an empty state if the bytes are malformed.
    static State decode(const std::string& bytes);

    /// Returns whether this rank has entered `id` with the same signature, as
    /// far as the signature is still stored.
    bool has_entered(const CollectiveId& id) const;
  };

  State state(std::optional<CollectiveId> waits_for) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, State::Group> groups_;
};

}  // namespace smp::health
