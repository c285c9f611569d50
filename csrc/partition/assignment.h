#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/partition/module_tree.h"

namespace smp::partition {

/// The partition that owns each module. The same on every rank.
struct Assignment {
  int num_partitions = 1;
  int num_chunks = 1;               ///< stages per partition
  std::vector<int> partition_idxs;  ///< per node of the tree
  std::vector<int> chunk_idxs;      ///< per node; 0 unless there are chunks
  std::vector<int64_t> load_bytes;  ///< parameter bytes per partition
  uint64_t hash = 0;                ///< of names, partitions and chunks

  /// Returns the number of stages, which a microbatch passes in order.
  int num_stages() const { return num_partitions * num_chunks; }
  int stage(int idx) const {
    return chunk_idxs[idx] * num_partitions + partition_idxs[idx];
  }
};

/// Completes an assignment from one partition, and chunk, per node.
/// @param chunk_idxs  empty: all 0
/// @throws ValueError if a partition is outside `[0, num_partitions)` or a
/// chunk
///     outside `[0, num_chunks)`, if their number is not that of the nodes, or
///     if the root is not on partition 0
Assignment make_assignment(const ModuleTree& tree, int num_partitions,
                           std::vector<int> partition_idxs, int num_chunks = 1,
                           std::vector<int> chunk_idxs = {});

/// Returns the lines of the log: per partition its parameter bytes, its share,
/// and its modules. A name means a whole subtree, a name in parentheses means a
/// module alone whose subtree is on several partitions. Numbered siblings that
/// follow one another share one name, and modules without state are left out:
///
///     Partition assignments:
///     pp_rank 0: 1048576 bytes (50.0 %): (root), embedding, (h), h.[0-5]
///     pp_rank 1: 1048576 bytes (50.0 %): h.[6-11], head
///
/// With several chunks there is a line for each, "pp_rank 0 chunk 1: ...".
std::string to_text(const ModuleTree& tree, const Assignment& assignment);

}  // namespace smp::partition
