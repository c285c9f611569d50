#include "csrc/partition/assignment.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "csrc/common/check.h"

namespace smp::partition {

namespace {

// FNV-1a, 64 bit: short, and the same on every machine.
class Fnv1a {
 public:
  void add(const std::string& text) {
    for (unsigned char c : text) add_byte(c);
    add_byte(0);  // so that ("ab", "c") and ("a", "bc") differ
  }
  void add(int value) {
    for (int shift = 0; shift < 32; shift += 8) {
      add_byte(static_cast<unsigned char>(value >> shift));
    }
  }
  uint64_t value() const { return value_; }

 private:
  void add_byte(unsigned char byte) {
    value_ = (value_ ^ byte) * 1099511628211ull;
  }
  uint64_t value_ = 14695981039346656037ull;
};

uint64_t hash_of(const ModuleTree& tree, const Assignment& assignment) {
  Fnv1a hash;
  hash.add(assignment.num_partitions);
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    hash.add(tree.node(idx).name);
    hash.add(assignment.stage(idx));
  }
  return hash.value();
}

// A name with its last number: "transformer.h.6" is number 6 of
// "transformer.h."; "lm_head" has no number.
struct NumberedName {
  std::string stem;
  long number;
};

std::optional<NumberedName> split_number(const std::string& name) {
  const size_t start = name.rfind('.') + 1;  // npos + 1 is 0
  const std::string last = name.substr(start);
  const bool is_number = !last.empty() && last.size() < 10 &&
                         std::all_of(
                             last.begin(), last.end(),
                             [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number) return std::nullopt;
  return NumberedName{name.substr(0, start), std::stol(last)};
}

// Writes a.[0-5] for a.0, a.1, ..., a.5 in a row.
std::string join_collapsed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size();) {
    size_t end = i + 1;
    const auto first = split_number(names[i]);
    while (first && end < names.size()) {
      const auto next = split_number(names[end]);
      const long expected = first->number + static_cast<long>(end - i);
      if (!next || next->stem != first->stem || next->number != expected) break;
      ++end;
    }
    if (!text.empty()) text += ", ";
    if (end - i > 1) {
      text +=
          detail::concat(first->stem, "[", first->number, "-",
                         first->number + static_cast<long>(end - i) - 1, "]");
    } else {
      text += names[i];
    }
    i = end;
  }
  return text.empty() ? "(no modules)" : text;
}

// Returns per stage the names of whole subtrees and of modules alone, in order.
std::vector<std::vector<std::string>> names_by_stage(
    const ModuleTree& tree, const Assignment& assignment) {
  std::vector<bool> has_state(tree.num_nodes());  // in the subtree
  std::vector<bool> whole(tree.num_nodes(), true);
  for (int idx = tree.num_nodes() - 1; idx >= 0; --idx) {
    has_state[idx] = has_state[idx] || tree.node(idx).has_state;
    const int parent_idx = tree.node(idx).parent_idx;
    if (parent_idx < 0 || !has_state[idx]) continue;
    has_state[parent_idx] = true;
    if (!whole[idx] || assignment.stage(idx) != assignment.stage(parent_idx)) {
      whole[parent_idx] = false;
    }
  }
  std::vector<std::vector<std::string>> names(assignment.num_stages());
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    const ModuleTree::Node& node = tree.node(idx);
    const bool is_root = node.parent_idx < 0;
    // Below a whole subtree nothing is named; its nodes are whole as well.
    if (!is_root && (!has_state[idx] || whole[node.parent_idx])) continue;
    const std::string name = is_root ? "root" : node.name;
    names[assignment.stage(idx)].push_back(
        whole[idx] && !is_root ? name : "(" + name + ")");
  }
  return names;
}

}  // namespace

Assignment make_assignment(const ModuleTree& tree, int num_partitions,
                           std::vector<int> partition_idxs, int num_chunks,
                           std::vector<int> chunk_idxs) {
  if (chunk_idxs.empty()) chunk_idxs.assign(partition_idxs.size(), 0);
  SMP_CHECK_VALUE(static_cast<int>(partition_idxs.size()) == tree.num_nodes() &&
                      chunk_idxs.size() == partition_idxs.size(),
                  "partition: expected one partition for each of the ",
                  tree.num_nodes(), " modules, got ", partition_idxs.size(),
                  " and ", chunk_idxs.size(), " chunks");
  Assignment assignment;
  assignment.num_partitions = num_partitions;
  assignment.num_chunks = num_chunks;
  assignment.load_bytes.assign(num_partitions, 0);
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    const int partition_idx = partition_idxs[idx];
    SMP_CHECK_VALUE(partition_idx >= 0 && partition_idx < num_partitions,
                    "partition ", partition_idx, " of module '",
                    tree.node(idx).name, "' must be in [0, ", num_partitions,
                    "); choose another or raise pipeline_parallel_degree");
    SMP_CHECK_VALUE(chunk_idxs[idx] >= 0 && chunk_idxs[idx] < num_chunks,
                    "chunk ", chunk_idxs[idx], " of module '",
                    tree.node(idx).name, "' must be in [0, ", num_chunks, ")");
    assignment.load_bytes[partition_idx] += tree.node(idx).param_bytes;
  }
  SMP_CHECK_VALUE(
      tree.num_nodes() == 0 || (partition_idxs[0] == 0 && chunk_idxs[0] == 0),
      "partition: the root module runs on partition 0, got ",
      partition_idxs[0]);
  assignment.partition_idxs = std::move(partition_idxs);
  assignment.chunk_idxs = std::move(chunk_idxs);
  assignment.hash = hash_of(tree, assignment);
  return assignment;
}

std::string to_text(const ModuleTree& tree, const Assignment& assignment) {
  const std::vector<std::vector<std::string>> names =
      names_by_stage(tree, assignment);
  std::vector<int64_t> stage_bytes(assignment.num_stages(), 0);
  for (int idx = 0; idx < tree.num_nodes(); ++idx) {
    stage_bytes[assignment.stage(idx)] += tree.node(idx).param_bytes;
  }
  const int64_t total = tree.total_param_bytes();
  std::string text = "Partition assignments:";
  for (int p = 0; p < assignment.num_partitions; ++p) {
    for (int chunk = 0; chunk < assignment.num_chunks; ++chunk) {
      const int stage = chunk * assignment.num_partitions + p;
      char share[32];
      std::snprintf(share, sizeof(share), "%.1f",
                    total > 0 ? 100.0 * stage_bytes[stage] / total : 0.0);
      text += detail::concat("\npp_rank ", p);
      if (assignment.num_chunks > 1) text += detail::concat(" chunk ", chunk);
      text += detail::concat(": ", stage_bytes[stage], " bytes (", share,
                             " %): ", join_collapsed(names[stage]));
    }
  }
  return text;
}

}  // namespace smp::partition
