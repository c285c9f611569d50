#pragma once

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/gradients/reducer_fixture.h"

namespace smp::gradients {

/// Ranks of a data-parallel group: `q` hold one copy of the state together,
/// `replicas` of these copies, and all that `tp` times.
struct ShardGrid {
  int q = 2;
  int replicas = 1;
  int tp = 1;

  int size() const { return q * replicas * tp; }
};

/// Communicators of one rank.
struct ShardGroups {
  comm::CommunicatorPtr dp;
  comm::CommunicatorPtr control;  // the same ranks, of the host
  comm::CommunicatorPtr plain;  // the same ranks, for a reducer to compare with
  comm::CommunicatorPtr shard;
  std::vector<comm::CommunicatorPtr> further;

  Sharding sharding(ShardLayout layout, bool every_microbatch = false) const {
    return {layout, shard, further, every_microbatch};
  }
};

/// Runs `body(rank)` on one thread per rank; the first exception is thrown
/// again after all have ended, and `abort` is called to end them.
inline void on_threads(int size, const std::function<void(int)>& body,
                       const std::function<void()>& abort) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
        abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

/// Runs `body(rank, groups)` on one thread per rank of the grid.
inline void on_grid(const ShardGrid& grid,
                    const std::function<void(int, const ShardGroups&)>& body) {
  const int rdp = grid.q * grid.replicas;
  std::vector<comm::CommunicatorPtr> all;
  auto worlds = [&](int count, int size, const char* name) {
    std::vector<std::vector<comm::CommunicatorPtr>> made;
    for (int i = 0; i < count; ++i) {
      made.push_back(comm::make_local_world(size, name));
      all.insert(all.end(), made.back().begin(), made.back().end());
    }
    return made;
  };
  const auto dp = worlds(2, grid.size(), "dp");
  const auto shard = worlds(grid.replicas * grid.tp, grid.q, "shard");
  const auto replica = worlds(grid.q * grid.tp, grid.replicas, "replica");
  const auto tp = worlds(rdp, grid.tp, "tp");
  auto groups_of = [&](int rank) {
    const int tp_rank = rank / rdp;
    const int rdp_rank = rank % rdp;
    const int copy = rdp_rank / grid.q;
    const int shard_rank = rdp_rank % grid.q;
    ShardGroups groups;
    groups.control = dp[0][rank];
    groups.dp = comm::as_wanted(groups.control);
    groups.plain = dp[1][rank];
    groups.shard =
        comm::as_wanted(shard[tp_rank * grid.replicas + copy][shard_rank]);
    if (grid.replicas > 1) {
      groups.further.push_back(
          comm::as_wanted(replica[tp_rank * grid.q + shard_rank][copy]));
    }
    if (grid.tp > 1) {
      groups.further.push_back(comm::as_wanted(tp[rdp_rank][tp_rank]));
    }
    return groups;
  };
  on_threads(
      grid.size(), [&](int rank) { body(rank, groups_of(rank)); },
      [&] {
        for (const auto& communicator : all) communicator->abort();
      });
}

/// Parameters of `shapes` of which a rank of a shard group holds a part.
struct ShardedRank {
  ShardedRank(const std::vector<std::vector<int64_t>>& shapes,
              const ShardGroups& groups, Reducer::Options options,
              c10::ScalarType dtype = c10::ScalarType::Double,
              c10::ScalarType accumulation = c10::ScalarType::Double) {
    std::vector<ParameterRecord> records;
    for (size_t i = 0; i < shapes.size(); ++i) {
      params.push_back(at::zeros(shapes[i], dtype).requires_grad_());
      records.push_back(whole_record(static_cast<int>(i),
                                     "p" + std::to_string(i), shapes[i], dtype,
                                     groups.dp->size()));
      records.back().accumulation_dtype = accumulation;
    }
    holdings.resize(shapes.size());
    targets.resize(shapes.size());
    for (const auto& bucket :
         plan_shards(records, options.bucket_cap_bytes, groups.shard->size(),
                     options.sharding->layout)) {
      for (const ShardHolding& held :
           bucket.holdings[groups.shard->group_rank()]) {
        holdings[held.record_idx] = held;
        if (held.numel == 0) continue;
        targets[held.record_idx] =
            at::zeros({held.numel}, accumulation).requires_grad_();
      }
    }
    options.control = groups.control;
    reducer = std::make_unique<Reducer>(params, targets, records, groups.dp,
                                        std::move(options));
  }

  void contribute(int i, int mb, const at::Tensor& grad) {
    const TaskScope task({0, mb});
    torch::autograd::backward({params[i].mul(1)}, {grad});
  }
  void contribute(int i, int mb, double value) {
    contribute(i, mb, at::full_like(params[i].detach(), value));
  }

  /// Returns the part of a whole gradient that this rank holds.
  at::Tensor part(int i, const at::Tensor& whole) const {
    return whole.reshape({-1}).narrow(0, holdings[i].begin, holdings[i].numel);
  }
  at::Tensor grad(int i) const { return targets[i].grad(); }
  bool holds(int i) const { return targets[i].defined(); }
  void zero_grad() {
    for (const at::Tensor& target : targets) {
      if (target.defined()) target.mutable_grad().reset();
    }
  }

  std::vector<at::Tensor> params;
  std::vector<at::Tensor> targets;
  std::vector<ShardHolding> holdings;
  std::unique_ptr<Reducer> reducer;
};

}  // namespace smp::gradients
