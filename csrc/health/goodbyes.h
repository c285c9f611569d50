#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/health/collective_log.h"
#include "csrc/health/rank_set.h"

namespace smp::health {

/// The ranks that have said goodbye, as far as this process has been told. The
/// hub stores what a rank had entered before it left. A process asks for that
/// when it waits for a collective of the rank. Few processes ever need it, and
/// sending it to all would grow with the square of the number of ranks.
/// Thread-safe.
class Goodbyes {
 public:
  /// @param entered  collectives that the rank has done its part of
  /// @return whether that is news
  bool add(int global_rank, CollectiveLog::State entered);
  /// Adds ranks whose entered collectives are stored by the hub only.
  bool add(const RankSet& ranks);

  bool has(int global_rank) const;

  /// Returns a rank of the collective that has left and will not do its part.
  /// Asks the hub if that is unknown, so that the answer may come with a later
  /// call. Call it without locks that `send_query` needs.
  std::optional<int> rank_left_before(const CollectiveId& collective);

  /// Records the hub's answer: `global_rank` will not do its part of that
  /// collective.
  void on_answer(const CollectiveId& collective, int global_rank);

  /// Returns when no call to the previous `send_query` is running.
  /// @param ask  sends the question to the hub, from any thread; or nothing
  void set_send_query(std::function<void(const CollectiveId&)> send_query);

 private:
  // The hub's answer about a collective that this process has waited for.
  struct HubQuery {
    int64_t sent_at = -1;  // number of news when it was sent
    std::optional<int> answer;
  };
  using Key = std::pair<uint64_t, int64_t>;  // group, sequence

  bool must_query(const CollectiveId& collective, std::optional<int>& found);

  mutable std::mutex mutex_;
  std::map<int, std::optional<CollectiveLog::State>> left_;
  std::map<Key, HubQuery> queries_;
  int64_t num_news_ = 0;
  std::mutex query_mutex_;  // held while asking: see set_send_query
  std::function<void(const CollectiveId&)> send_query_;
};

}  // namespace smp::health
