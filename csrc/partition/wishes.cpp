#include "csrc/partition/wishes.h"

#include <string>
#include <vector>

#include "csrc/common/check.h"

namespace smp::partition {

namespace {

constexpr int kMostNamed = 4;  // modules, in an error

}  // namespace

void check_wishes(const ModuleTree& tree, int num_partitions) {
  if (!tree.has_wishes()) return;
  const DecisionTree decisions(tree);
  std::vector<int> asked(decisions.num_units(), -1);  // the first node that is
  for (int idx = 1; idx < tree.num_nodes(); ++idx) {
    const int wish = tree.wish(idx);
    const int id = decisions.unit_of(idx);
    if (wish < 0) continue;
    const std::string& name = tree.node(idx).name;
    SMP_CHECK_VALUE(wish < num_partitions, "partition: module '", name,
                    "' is set to partition ", wish, ", but there are ",
                    num_partitions, " partitions");
    if (id < 0) continue;
    SMP_CHECK_VALUE(!decisions.units()[id].pinned || wish == 0,
                    "partition: module '", name, "' is set to partition ", wish,
                    ", but must be on partition 0: it shares a parameter with, "
                    "or is used by, code that has to run where the step "
                    "begins; leave it unset or set it to partition 0");
    if (asked[id] < 0) asked[id] = idx;
    const int first = asked[id];
    SMP_CHECK_VALUE(
        tree.wish(first) == wish, "partition: module '", tree.node(first).name,
        "' is set to partition ", tree.wish(first), " and '", name,
        "' to partition ", wish,
        ", but they must be on one: they share a parameter, one uses what the "
        "other holds, or they are parts of a module that cannot be cut; set "
        "both to the same partition");
  }
}

int asked_node(const DecisionTree& decisions, int unit_id) {
  int idx = 0;
  while (decisions.unit_of(idx) != unit_id || decisions.tree().wish(idx) < 0)
    ++idx;
  return idx;
}

void raise_wishes(const DecisionTree& decisions,
                  const PartitionOptions& options) {
  std::string names;
  int num_named = 0;
  int num_free = 0;
  for (const DecisionTree::Unit& unit : decisions.units()) {
    if (unit.wish < 0) ++num_free;
    if (unit.wish < 0 || num_named++ >= kMostNamed) continue;
    names += detail::concat(names.empty() ? "" : ", ", "'",
                            decisions.tree().node(unit.place_idx).name, "' on ",
                            unit.wish);
  }
  if (num_named > kMostNamed) {
    names += detail::concat(" and ", num_named - kMostNamed, " more");
  }
  throw ValueError(detail::concat(
      rank_prefix(), "partition: the modules that set_partition has placed (",
      names, ") leave ", num_free, " others, too few for ",
      options.num_partitions, " partitions with a module each",
      options.num_chunks > 1 ? " in every chunk" : "",
      "; set fewer of them, spread them over the partitions, or use "
      "auto_partition=False"));
}

}  // namespace smp::partition
