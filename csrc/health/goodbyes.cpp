#include "csrc/health/goodbyes.h"

#include <utility>

namespace smp::health {

bool Goodbyes::add(int global_rank, CollectiveLog::State entered) {
  std::lock_guard lock(mutex_);
  const bool is_new = left_.try_emplace(global_rank, std::move(entered)).second;
  if (is_new) ++num_news_;
  return is_new;
}

bool Goodbyes::add(const RankSet& ranks) {
  std::lock_guard lock(mutex_);
  bool is_new = false;
  for (const int rank : ranks.ranks()) {
    is_new |= left_.try_emplace(rank, std::nullopt).second;
  }
  if (is_new) ++num_news_;
  return is_new;
}

bool Goodbyes::has(int global_rank) const {
  std::lock_guard lock(mutex_);
  return left_.contains(global_rank);
}

std::optional<int> Goodbyes::rank_left_before(const CollectiveId& collective) {
  CollectiveId its_part = collective;
  its_part.goes_on_alone = true;  // the rank waited for it before it left
  std::optional<int> found;
  if (!must_query(its_part, found)) return found;
  std::lock_guard lock(query_mutex_);
  if (send_query_) send_query_(its_part);
  return std::nullopt;
}

// Returns whether the hub has to be asked, once after each news.
bool Goodbyes::must_query(const CollectiveId& collective,
                          std::optional<int>& found) {
  std::lock_guard lock(mutex_);
  if (left_.empty()) return false;
  bool is_known = true;
  for (const int rank : collective.ranks) {
    const auto entry = left_.find(rank);
    if (entry == left_.end()) continue;
    if (!entry->second) {
      is_known = false;
    } else if (!entry->second->has_entered(collective)) {
      found = rank;
      return false;
    }
  }
  if (is_known) return false;
  HubQuery& query = queries_[{collective.group, collective.sequence}];
  found = query.answer;
  if (found || query.sent_at == num_news_) return false;
  query.sent_at = num_news_;
  return true;
}

void Goodbyes::on_answer(const CollectiveId& collective, int global_rank) {
  std::lock_guard lock(mutex_);
  queries_[{collective.group, collective.sequence}].answer = global_rank;
}

void Goodbyes::set_send_query(
    std::function<void(const CollectiveId&)> send_query) {
  std::lock_guard lock(query_mutex_);
  send_query_ = std::move(send_query);
}

}  // namespace smp::health
