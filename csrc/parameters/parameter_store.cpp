#include "csrc/parameters/parameter_store.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::parameters {

ParameterStore::ParameterStore(const std::vector<at::Tensor>& params,
                               const std::vector<at::Tensor>& shards,
                               std::vector<std::vector<int>> units,
                               std::vector<std::string> names,
                               GatherGroupPtr group, Options options)
    : pool_(params.empty() ? at::Device(at::kCPU) : params.front().device()),
      group_(std::move(group)),
      options_(std::move(options)) {
  SMP_CHECK_VALUE(
      params.size() == shards.size() && units.size() == names.size(),
      "expected a shard per parameter and a name per unit, got ", params.size(),
      " parameters, ", shards.size(), " shards, ", units.size(), " units, ",
      names.size(), " names");
  for (size_t i = 0; i < params.size(); ++i) {
    params_.emplace_back(params[i], shards[i], group_->size(), pool_);
  }
  for (const ShardedParameter& param : params_) {
    pool_.expect(param.num_bytes());
  }
  std::vector<int> num_units_of(params.size());
  for (size_t i = 0; i < units.size(); ++i) {
    for (const int param_idx : units[i]) ++num_units_of.at(param_idx);
    units_.push_back({std::move(units[i]), std::move(names[i])});
  }
  for (size_t i = 0; i < params.size(); ++i) {
    SMP_CHECK_VALUE(num_units_of[i] == 1, "parameter ", i, " is in ",
                    num_units_of[i], " units, expected one");
  }
}

// ---- passes -----------------------------------------------------------------

void ParameterStore::begin_pass(int64_t kind, bool is_passing) {
  Lock lock(mutex_);
  close_pass(lock);
  order_.begin(kind);
  in_pass_ = true;
  is_passing_ = is_passing;
  look_ahead();
}

void ParameterStore::end_pass() {
  Lock lock(mutex_);
  for (const Unit& unit : units_) {
    SMP_ASSERT(unit.num_holders == 0, "unit ", unit.name, " is held by ",
               unit.num_holders, " at the end of a pass");
  }
  close_pass(lock);
}

void ParameterStore::end_passing() {
  Lock lock(mutex_);
  if (in_pass_ && is_passing_ && !is_held()) close_pass(lock);
}

void ParameterStore::meet() {
  GatherPtr meeting;
  {
    const std::lock_guard lock(mutex_);
    meeting = group_->meet(stamp_of_end());
  }
  follow(stamp_of_end(), [&] {
    meeting->follow(options_.wait, "end of the use of sharded parameters");
  });
}

void ParameterStore::abandon_pass() {
  const std::lock_guard lock(mutex_);
  order_.end();
  in_pass_ = false;
}

void ParameterStore::close_pass(Lock& lock) {
  if (!in_pass_) return;
  order_.end();
  in_pass_ = false;
  release_ahead(lock);
  pool_.clear();
}

bool ParameterStore::in_lasting_pass() const {
  const std::lock_guard lock(mutex_);
  return in_pass_ && !is_passing_;
}

bool ParameterStore::is_held() const {
  return std::any_of(units_.begin(), units_.end(),
                     [](const Unit& unit) { return unit.num_holders > 0; });
}

// ---- holding ----------------------------------------------------------------

void ParameterStore::hold(const std::vector<int>& units,
                          const std::vector<int>& done) {
  Lock lock(mutex_);
  SMP_CHECK(!is_broken_ || units.empty(),
            "an earlier gather of parameters failed; the process group cannot "
            "be used any more, restart the job");
  const bool is_expected = count_holders(units);
  drop(done);
  if (!is_expected) release_ahead(lock);
  if (is_broken_) return;
  for (const int unit_idx : units) launch(unit_idx);
  if (in_pass_) {
    look_ahead();
  } else {
    pool_.clear();
  }
  for (const int unit_idx : units) finish(lock, unit_idx);
}

// Counts the holders of units. @return false when the order did not predict
// these units
bool ParameterStore::count_holders(const std::vector<int>& units) {
  bool is_expected = true;
  for (const int unit_idx : units) {
    Unit& unit = units_.at(unit_idx);
    if (unit.num_holders++ > 0) continue;
    if (unit.is_ahead) ++stats_.num_hits;
    unit.is_ahead = false;
    if (!in_pass_ || order_.use(unit_idx)) continue;
    ++stats_.num_deviations;
    is_expected = false;
  }
  return is_expected;
}

void ParameterStore::drop(const std::vector<int>& done) {
  for (const int unit_idx : done) {
    Unit& unit = units_.at(unit_idx);
    SMP_ASSERT(unit.num_holders > 0 || is_broken_, "unit ", unit.name);
    if (unit.num_holders == 0 || --unit.num_holders > 0) continue;
    const std::vector<int> next = order_.next(options_.num_ahead);
    unit.is_ahead = stats_.live_elements <= options_.max_live_elements &&
                    std::find(next.begin(), next.end(), unit_idx) != next.end();
    if (!unit.is_ahead) release(unit);
  }
}

int64_t ParameterStore::missing_elements(const Unit& unit) const {
  int64_t numel = 0;
  for (const int i : unit.param_idxs) {
    if (!params_[i].has_memory()) numel += params_[i].numel();
  }
  return numel;
}

// Begins to gather the missing parameters of a unit.
void ParameterStore::launch(int unit_idx) {
  Unit& unit = units_[unit_idx];
  if (unit.gather) return;
  std::vector<ShardedParameter*> missing;
  for (const int i : unit.param_idxs) {
    ShardedParameter& param = params_[i];
    if (param.has_memory()) continue;
    missing.push_back(&param);
    stats_.gathered_bytes += param.num_bytes();
    if (stays(param)) {
      stats_.persistent_elements += param.numel();
    } else {
      unit.live_elements += param.numel();
    }
  }
  if (missing.empty()) return;
  stats_.live_elements += unit.live_elements;
  stats_.peak_live_elements =
      std::max(stats_.peak_live_elements, stats_.live_elements);
  is_broken_ = true;  // unless the code below succeeds
  unit.gather = std::make_shared<UnitGather>(
      std::move(missing), *group_, static_cast<uint64_t>(unit_idx) + 1,
      detail::concat("gathering the parameters of ", unit.name));
  is_broken_ = false;
  ++stats_.num_gathers;
  stats_.num_collectives += unit.gather->num_collectives();
}

void ParameterStore::look_ahead() {
  for (const int unit_idx : order_.next(options_.num_ahead)) {
    Unit& unit = units_[unit_idx];
    if (unit.num_holders > 0 || unit.is_ahead) continue;
    const int64_t live = stats_.live_elements + missing_elements(unit);
    if (live > options_.max_live_elements) return;
    launch(unit_idx);
    unit.is_ahead = true;
  }
}

// Waits until a unit is whole; the lock is open meanwhile.
void ParameterStore::finish(Lock& lock, int unit_idx) {
  const UnitGatherPtr gather = units_[unit_idx].gather;
  if (!gather) return;
  lock.unlock();
  try {
    follow(static_cast<uint64_t>(unit_idx) + 1,
           [&] { gather->finish(options_.wait); });
  } catch (...) {
    lock.lock();
    is_broken_ = true;
    throw;
  }
  lock.lock();
  Unit& unit = units_[unit_idx];
  if (unit.gather == gather) unit.gather.reset();
}

// ---- comparing ----------------------------------------------------------

template <typename Follow>
void ParameterStore::follow(uint64_t stamp, const Follow& follow) const {
  try {
    follow();
  } catch (const comm::Disagreement& disagreement) {
    if (disagreement.other().stamp == stamp) throw;  // on sizes
    raise(disagreement.other(), stamp);
  }
}

void ParameterStore::raise(const comm::OtherCall& other, uint64_t stamp) const {
  SMP_CHECK_VALUE(
      false, "ranks that share parameters run different modules: ",
      describe(group_->group_rank(), stamp), ", ",
      describe(other.group_rank, other.stamp),
      "; with sharded_data_parallel_degree all ranks of a group run the same "
      "modules in one order. Where a rank has nothing for a module (no image "
      "in its batch), let it run the module on a dummy that counts nothing, "
      "loss = loss + 0 * module(dummy).sum(), or shard the state of the "
      "optimizer only (shard_optimizer_state)");
}

// Units and names are the same on all ranks of the group.
std::string ParameterStore::describe(int group_rank, uint64_t stamp) const {
  std::string who = "another rank";
  const std::vector<int>& ranks = options_.wait.peers;
  if (group_rank >= 0 && group_rank < std::ssize(ranks)) {
    const int rank = ranks[group_rank];
    who = detail::concat("global_rank ", rank);
    if (options_.wait.faults) {
      who += " (" + options_.wait.faults->coordinates(rank) + ")";
    }
  }
  if (stamp == stamp_of_end()) return who + " has run all that it runs";
  if (stamp == 0 || stamp > stamp_of_end()) return who + " does something else";
  if (stamp <= units_.size()) {
    return who + " gathers the parameters of '" + units_[stamp - 1].name + "'";
  }
  return detail::concat(who, " gathers the value of parameter ",
                        stamp - 1 - units_.size());
}

// ---- letting go -------------------------------------------------------------

void ParameterStore::release(Unit& unit) {
  for (const int i : unit.param_idxs) {
    if (!stays(params_[i])) params_[i].release();
  }
  stats_.live_elements -= std::exchange(unit.live_elements, 0);
}

// Frees units gathered ahead. A gather in flight must finish before its memory
// is freed.
void ParameterStore::release_ahead(Lock& lock) {
  for (size_t i = 0; i < units_.size(); ++i) {
    if (!units_[i].is_ahead) continue;
    finish(lock, static_cast<int>(i));
    Unit& unit = units_[i];
    if (!unit.is_ahead) continue;  // another thread has taken it meanwhile
    unit.is_ahead = false;
    release(unit);
  }
}

void ParameterStore::mark_stale() {
  Lock lock(mutex_);
  release_ahead(lock);
  for (Unit& unit : units_) {
    SMP_CHECK(unit.num_holders == 0, "the parameters of ", unit.name,
              " are updated while a forward or a backward uses them; update "
              "them after it");
  }
  for (ShardedParameter& param : params_) param.release();
  stats_.persistent_elements = 0;
}

at::Tensor ParameterStore::gather_one(int param_idx) {
  const at::NoGradGuard no_grad;
  const ShardedParameter& param = params_.at(param_idx);
  at::Tensor parts;
  GatherPtr comparison;
  GatherPtr gather;
  const auto stamp = static_cast<uint64_t>(units_.size() + param_idx) + 1;
  const std::string what = detail::concat("gathering parameter ", param_idx);
  {
    const std::lock_guard lock(mutex_);
    if (param.has_memory() && stays(param)) return at::clone(param.whole());
    parts = at::empty({group_->size() * param.shard().numel()},
                      param.shard().options());
    comparison = group_->compare(stamp);
    gather = group_->all_gather(parts.view(at::kByte),
                                param.shard().view(at::kByte), stamp);
  }
  follow(stamp, [&] {
    if (comparison) comparison->follow(options_.wait, what);
    gather->follow(options_.wait, what);
  });
  return parts.narrow(0, 0, param.numel()).view(param.whole().sizes());
}

std::vector<int> ParameterStore::units_shown_by(
    const at::Tensor& tensor, const std::vector<int>& units) const {
  std::vector<int> found;
  if (!tensor.has_storage()) return found;
  for (const int unit_idx : units) {
    for (const int i : units_[unit_idx].param_idxs) {
      if (!params_[i].parts().is_alias_of(tensor)) continue;
      found.push_back(unit_idx);
      break;
    }
  }
  return found;
}

ParameterStore::Stats ParameterStore::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace smp::parameters
