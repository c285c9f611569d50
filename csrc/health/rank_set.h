#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace smp::health {

/// Ranks of a job in few bytes, as frames carry them: a bit for each rank up to
/// the highest one in the set.
class RankSet {
 public:
  RankSet() = default;

  /// @param global_rank  at least 0
  void add(int global_rank);
  bool is_empty() const { return bits_.empty(); }
  /// Ascending.
  std::vector<int> ranks() const;

  const std::string& encode() const { return bits_; }
  /// @param bytes  any, of a frame: each is a right set
  static RankSet decode(std::string_view bytes);

 private:
  std::string bits_;  // rank 0 is the lowest bit of the first byte
};

}  // namespace smp::health
