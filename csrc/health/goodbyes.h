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

/// Which ranks have said goodbye, as far as this process has been told. What a
/// rank had entered before it left is known to the hub, and is asked for when
/// somebody waits for a collective of that rank: few ranks ever need it, and
/// told to all it would grow with the square of their number. Thread-safe.
class Goodbyes {
 public:
  /// @param entered  the collectives that the rank has done its part of
  /// @return whether that is news
  bool add(int global_rank, CollectiveLog::State entered);
  /// Ranks of which only the hub knows what they had entered.
  bool add(const RankSet& ranks);

  bool has(int global_rank) const;

  /// A rank of the collective that has left, and will not do its part. Asks for
  /// what is not known, so that the answer may come with a later call. Without
  /// locks that `ask` needs.
  std::optional<int> who_left_before(const CollectiveId& collective);

  /// The answer: `global_rank` will not do its part of that collective.
  void on_answer(const CollectiveId& collective, int global_rank);

  /// @param ask  gets the question to the hub, from any thread; nothing: nobody
  ///             does. Returns when no call to the one before is running.
  void set_ask(std::function<void(const CollectiveId&)> ask);

 private:
  // What is known of a collective that somebody has waited for.
  struct Question {
    int64_t asked_at = -1;  // the number of news, when it was asked
    std::optional<int> answer;
  };
  using Key = std::pair<uint64_t, int64_t>;  // group, sequence

  bool must_ask(const CollectiveId& collective, std::optional<int>& found);

  mutable std::mutex mutex_;
  std::map<int, std::optional<CollectiveLog::State>> left_;
  std::map<Key, Question> questions_;
  int64_t num_news_ = 0;
  std::mutex ask_mutex_;  // held while asking: see set_ask
  std::function<void(const CollectiveId&)> ask_;
};

}  // namespace smp::health
