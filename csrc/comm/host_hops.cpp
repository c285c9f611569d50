#include "csrc/comm/host_hops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/comm/reduce_into.h"
#include "csrc/comm/threaded_work.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

void finish_hop(const std::vector<WorkPtr>& works, const char* where) {
  for (const WorkPtr& work : works) {
    try {
      work->wait(kLongestWait);
    } catch (const std::exception& error) {
      throw Error(detail::concat(where, ": ", plain_text(error)));
    }
  }
}

Communicator& stamped(Communicator& group, uint64_t stamp) {
  if (stamp != 0) group.stamp_next(stamp);
  return group;
}

constexpr const char* kWithin = "within the host";
constexpr const char* kAcross = "between hosts";

class SumHops final : public HostHops {
 public:
  SumHops(at::Tensor part, ReduceOp op, uint64_t stamp)
      : part_(std::move(part)), op_(op), stamp_(stamp) {}

  void leave(const HostGroups& groups) override {
    const int64_t per_host = groups.scatter->size();
    const int64_t share = (part_.numel() + per_host - 1) / per_host;
    share_ = at::empty({share}, part_.options());
    padded_ = part_;
    if (share * per_host != part_.numel()) {
      padded_ = at::zeros({share * per_host}, part_.options());
      padded_.narrow(0, 0, part_.numel()).copy_(part_);
    }
    Communicator& scatter = stamped(*groups.scatter, stamp_);
    finish_hop({scatter.reduce_scatter(share_, padded_, op_)}, kWithin);
    crossing_ = groups.across->all_reduce(share_, op_);
  }

  void arrive(const HostGroups& groups) override {
    finish_hop({crossing_}, kAcross);
    finish_hop({groups.gather->all_gather(padded_, share_)}, kWithin);
    if (padded_.is_same(part_)) return;
    part_.copy_(padded_.narrow(0, 0, part_.numel()));
  }

 private:
  at::Tensor part_;
  const ReduceOp op_;
  const uint64_t stamp_;
  at::Tensor padded_;  // `part_` itself where its ranks have equal shares
  at::Tensor share_;
  WorkPtr crossing_;
};

// Sends part (host, place) of the input to the rank with this place on that
// host. Before that, the own host sums the parts for each host by place.
class ScatterHops final : public HostHops {
 public:
  ScatterHops(at::Tensor output, at::Tensor input, ReduceOp op, uint64_t stamp)
      : output_(std::move(output)),
        input_(std::move(input)),
        op_(op),
        stamp_(stamp) {}

  void leave(const HostGroups& groups) override {
    const int64_t num_hosts = groups.across->size();
    shares_ = at::empty({num_hosts * output_.numel()}, output_.options());
    const at::Tensor shares = shares_.view({num_hosts, -1});
    const at::Tensor by_host = input_.view({num_hosts, -1});
    std::vector<WorkPtr> works;
    for (int64_t host = 0; host < num_hosts; ++host) {
      works.push_back(stamped(*groups.scatter, stamp_)
                          .reduce_scatter(shares[host], by_host[host], op_));
    }
    finish_hop(works, kWithin);
    if (num_hosts > kMostHostsAtOnce) {
      crossing_ = groups.across->reduce_scatter(output_, shares_, op_);
      return;
    }
    received_ = at::empty_like(shares_);
    crossing_ = groups.across->all_to_all(received_, shares_);
  }

  void arrive(const HostGroups& groups) override {
    finish_hop({crossing_}, kAcross);
    if (!received_.defined()) return;
    const at::Tensor by_host = received_.view({groups.across->size(), -1});
    for (int64_t begin = 0; begin < output_.numel(); begin += kReduceElements) {
      const int64_t count = std::min(kReduceElements, output_.numel() - begin);
      add_up(output_.narrow(0, begin, count), by_host.narrow(1, begin, count));
    }
  }

 private:
  // Most hosts for a direct exchange. Above it a ring is used, which needs
  // fewer connections.
  static constexpr int64_t kMostHostsAtOnce = 16;

  void add_up(const at::Tensor& to, const at::Tensor& by_host) const {
    const at::ScalarType dtype = to.scalar_type();
    const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
    at::Tensor sum = is_half ? by_host[0].to(at::kFloat) : to;
    if (!is_half) sum.copy_(by_host[0]);
    for (int64_t host = 1; host < by_host.size(0); ++host) {
      reduce_into(sum, is_half ? by_host[host].to(at::kFloat) : by_host[host],
                  op_);
    }
    if (is_half) to.copy_(sum);  // rounded once
  }

  const at::Tensor output_;
  const at::Tensor input_;
  const ReduceOp op_;
  const uint64_t stamp_;
  at::Tensor shares_;    // of the own place, by host
  at::Tensor received_;  // what each host has of the own part
  WorkPtr crossing_;
};

class GatherHops final : public HostHops {
 public:
  GatherHops(at::Tensor output, at::Tensor input, uint64_t stamp)
      : output_(std::move(output)), input_(std::move(input)), stamp_(stamp) {}

  void leave(const HostGroups& groups) override {
    parts_ =
        at::empty({groups.across->size() * input_.numel()}, input_.options());
    crossing_ = groups.across->all_gather(parts_, input_);
  }

  void arrive(const HostGroups& groups) override {
    finish_hop({crossing_}, kAcross);
    const int64_t num_hosts = groups.across->size();
    const at::Tensor parts = parts_.view({num_hosts, -1});
    const at::Tensor by_host = output_.view({num_hosts, -1});
    std::vector<WorkPtr> works;
    for (int64_t host = 0; host < num_hosts; ++host) {
      works.push_back(stamped(*groups.gather, stamp_)
                          .all_gather(by_host[host], parts[host]));
    }
    finish_hop(works, kWithin);
  }

 private:
  const at::Tensor output_;
  const at::Tensor input_;
  const uint64_t stamp_;
  at::Tensor parts_;  // of the own place, by host
  WorkPtr crossing_;
};

}  // namespace

HostHopsPtr make_sum_hops(at::Tensor part, ReduceOp op, uint64_t stamp) {
  return std::make_unique<SumHops>(std::move(part), op, stamp);
}

HostHopsPtr make_scatter_hops(at::Tensor output, at::Tensor input, ReduceOp op,
                              uint64_t stamp) {
  return std::make_unique<ScatterHops>(std::move(output), std::move(input), op,
                                       stamp);
}

HostHopsPtr make_gather_hops(at::Tensor output, at::Tensor input,
                             uint64_t stamp) {
  return std::make_unique<GatherHops>(std::move(output), std::move(input),
                                      stamp);
}

}  // namespace smp::comm
