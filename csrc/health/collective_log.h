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

/// One collective, as all ranks of its group number it.
struct CollectiveId {
  uint64_t group = 0;           ///< equal on the ranks of the group only
  int64_t sequence = 0;         ///< among the collectives of the group, from 1
  uint64_t signature = 0;       ///< of what is called, and with how many bytes
  int64_t num_bytes = 0;        ///< that this rank puts in or gets, the larger
  std::vector<int> ranks = {};  ///< global ranks of the group
  bool goes_on_alone = true;    ///< also while none of its ranks waits for it
};

/// Which collectives this process has entered, that is issued, by group. With
/// the logs of all ranks one can tell whether a collective that somebody waits
/// for has been entered by all of its ranks, and as the same call. Thread-safe.
class CollectiveLog {
 public:
  /// Calls of a group that can still be compared with those of other ranks.
  static constexpr size_t kNumSignatures = 8;

  /// Numbers the next collective of `id.group`.
  void enter(CollectiveId& id);

  /// What one rank says of itself, as others read it.
  struct State {
    struct Group {
      uint64_t group = 0;
      int64_t num_entered = 0;
      /// Call number n is at n % kNumSignatures.
      std::array<uint64_t, kNumSignatures> signatures = {};
    };

    std::optional<CollectiveId> waits_for;
    std::vector<Group> groups;

    /// The ranks of `waits_for` come back in another order.
    std::string encode() const;
    /// Of bytes that make no sense: nothing.
    static State decode(const std::string& bytes);

    /// Whether this rank has entered `id`, as the same call as far as known.
    bool has_entered(const CollectiveId& id) const;
  };

  State state(std::optional<CollectiveId> waits_for) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, State::Group> groups_;
};

}  // namespace smp::health
