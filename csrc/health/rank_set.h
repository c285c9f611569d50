#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace smp::health {

/// A set of ranks in few bytes, as frames carry it: a bit for each rank up to
/// the highest one in the set.
class RankSet {
 public:
  RankSet() = default;

  /// @param global_rank  rank, at least 0
  void add(int global_rank);
  bool is_empty() const { return bits_.empty(); }
  /// Returns the ranks, ascending.
  std::vector<int> ranks() const;

  const std::string& encode() const { return bits_; }
  /// @param bytes  bytes of a frame; any bytes are a valid set
  static RankSet decode(std::string_view bytes);

 private:
  std::string bits_;  // rank 0 is the lowest bit of the first byte
};

}  // namespace smp::health
