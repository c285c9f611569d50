#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/comm/group_wait.h"
#include "csrc/parameters/gather_group.h"
#include "csrc/parameters/sharded_parameter.h"
#include "csrc/parameters/storage_pool.h"
#include "csrc/parameters/unit_gather.h"
#include "csrc/parameters/use_order.h"

namespace smp::parameters {

/// Gathers sharded parameters in units, and decides when each unit is whole.
///
/// A unit is whole while it has a holder. Units that are used next, as earlier
/// passes have shown, are gathered ahead, and kept if they are whole already,
/// while there is room for them. A *pass* is the part of a run that repeats: a
/// step, or a forward with its backward outside of steps.
///
/// All ranks of the group hold and release units in one order; then they gather
/// in one order. Thread-safe; the lock is never held while waiting for another
/// rank, except by threads that wait for the same unit. Where gathers run on
/// streams of a device the host waits for none; then one stream uses the
/// parameters of a rank.
///
/// Source: arXiv:1910.02054 (ZeRO, stage 3); recording the order of use is
/// DeepSpeed's idea.
class ParameterStore {
 public:
  struct Options {
    /// Limit of gathering ahead. Held units are not limited.
    int64_t max_live_elements = int64_t{1} << 60;
    /// Size below which parameters stay whole until the next update.
    int64_t persistence_threshold = 0;
    /// Number of units gathered ahead. With 1, one unit arrives while another
    /// one is used; more units take memory at the very peak of a step.
    int num_ahead = 1;
    comm::WaitOptions wait;
  };

  struct Stats {
    int64_t num_gathers = 0;      ///< gathers of units
    int64_t num_collectives = 0;  ///< collectives of these gathers
    int64_t gathered_bytes = 0;   ///< of all ranks' parts
    int64_t num_hits = 0;         ///< units that were there, or on their way
    int64_t num_deviations = 0;   ///< passes that used another order
    int64_t live_elements = 0;    ///< of parameters that do not stay whole
    int64_t peak_live_elements = 0;
    int64_t persistent_elements = 0;
  };

  /// @param params  show their placeholders (see ShardedParameter)
  /// @param shards  one per parameter
  /// @param units   positions of parameters, each of them in one unit
  /// @param names   names of the units, for errors
  ParameterStore(const std::vector<at::Tensor>& params,
                 const std::vector<at::Tensor>& shards,
                 std::vector<std::vector<int>> units,
                 std::vector<std::string> names, GatherGroupPtr group,
                 Options options);

  /// Opens a pass; an open pass ends. @see UseOrder::begin
  /// @param is_passing  no caller ends the pass: see `end_passing`
  void begin_pass(int64_t kind, bool is_passing = false);
  /// Ends a pass that no caller ends, if no unit is held.
  void end_passing();
  /// Ends a pass and frees units gathered ahead.
  /// @throws InternalError when a unit is still held
  void end_pass();
  /// Waits until the ranks have compared that none gathers anything any more,
  /// as before a sum of gradients, which a rank that gathers never reaches.
  /// Collective.
  /// @throws ValueError when some ranks run modules that others do not
  void meet();
  /// Closes a pass that failed, without waiting for other ranks.
  void abandon_pass();
  /// Returns whether a pass is open that a caller will end.
  bool in_lasting_pass() const;

  /// Makes units whole, after it has released others. Collective.
  /// @param done  units held before, each as often as it is named
  /// @throws ValueError when another rank of the group gathers something else
  void hold(const std::vector<int>& units, const std::vector<int>& done = {});
  void release(const std::vector<int>& done) { hold({}, done); }

  /// Notes that the shards have other values: parameters that stayed whole are
  /// out of date.
  /// @throws Error while units are held
  void mark_stale();

  /// Returns a copy of a whole parameter, which stays as it is. Collective.
  at::Tensor gather_one(int param_idx);

  /// Returns the units, among these held ones, with a parameter whose memory
  /// `tensor` shows.
  std::vector<int> units_shown_by(const at::Tensor& tensor,
                                  const std::vector<int>& units) const;

  int num_units() const { return static_cast<int>(units_.size()); }
  Stats stats() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using UnitGatherPtr = std::shared_ptr<UnitGather>;

  struct Unit {
    std::vector<int> param_idxs;
    std::string name;
    int64_t live_elements = 0;  // elements of it that are whole now
    int num_holders = 0;
    bool is_ahead = false;      // without holder; kept for its next use
    UnitGatherPtr gather = {};  // set until it has finished
  };

  bool stays(const ShardedParameter& param) const {
    return param.numel() < options_.persistence_threshold;
  }
  bool is_held() const;
  int64_t missing_elements(const Unit& unit) const;
  bool count_holders(const std::vector<int>& units);
  void drop(const std::vector<int>& done);
  void launch(int unit_idx);
  void look_ahead();
  void close_pass(Lock& lock);
  void release(Unit& unit);
  void release_ahead(Lock& lock);
  void finish(Lock& lock, int unit_idx);
  template <typename Follow>
  void follow(uint64_t stamp, const Follow& follow) const;
  [[noreturn]] void raise(const comm::OtherCall& other, uint64_t stamp) const;
  std::string describe(int group_rank, uint64_t stamp) const;
  uint64_t stamp_of_end() const { return units_.size() + params_.size() + 1; }

  StoragePool pool_;
  std::deque<ShardedParameter> params_;
  const GatherGroupPtr group_;
  const Options options_;

  mutable std::mutex mutex_;  // guards all that follows
  std::vector<Unit> units_;
  UseOrder order_;
  bool in_pass_ = false;
  bool is_passing_ = false;
  bool is_broken_ = false;  // a gather has failed
  Stats stats_;
};

using ParameterStorePtr = std::shared_ptr<ParameterStore>;

}  // namespace smp::parameters
