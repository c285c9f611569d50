#include "csrc/parameters/gather_group.h"

#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

namespace smp::parameters {
namespace {

using comm::CommunicatorPtr;
using comm::WorkPtr;

class GatherInOneHop final : public Gather {
 public:
  GatherInOneHop(comm::CommunicatorPtr group, comm::WorkPtr work)
      : group_(std::move(group)), work_(std::move(work)) {}

  void wait(const comm::Patience& patience, const std::string& what) override {
    if (!work_) return;
    comm::wait_for(*work_, patience, *group_, what);
    work_.reset();
  }

 private:
  const comm::CommunicatorPtr group_;
  comm::WorkPtr work_;
};

class GathersInOneHop final : public GatherGroup {
 public:
  explicit GathersInOneHop(comm::CommunicatorPtr group)
      : group_(std::move(group)) {}

  int group_rank() const override { return group_->group_rank(); }
  int size() const override { return group_->size(); }

  GatherPtr all_gather(at::Tensor output, at::Tensor input,
                       uint64_t stamp) override {
    group_->stamp_next(stamp);
    return std::make_unique<GatherInOneHop>(
        group_, group_->all_gather(std::move(output), input));
  }

 private:
  const comm::CommunicatorPtr group_;
};

// The second half begins when somebody waits: that happens in one order on all
// ranks, the end of the first half does not.
class GatherInTwoHops final : public Gather {
 public:
  GatherInTwoHops(comm::CommunicatorPtr across, comm::CommunicatorPtr within,
                  at::Tensor output, const at::Tensor& input, uint64_t stamp)
      : across_(std::move(across)),
        within_(std::move(within)),
        output_(std::move(output)),
        stamp_(stamp),
        crossed_(
            at::empty({across_->size() * input.numel()}, input.options())) {
    across_->stamp_next(stamp_);
    work_ = across_->all_gather(crossed_, input);
  }

  void wait(const comm::Patience& patience, const std::string& what) override {
    if (!work_) return;
    comm::wait_for(*work_, patience, *across_, what + " between hosts");
    const int64_t num_hosts = across_->size();
    const at::Tensor by_host = output_.view({num_hosts, -1});
    const at::Tensor crossed = crossed_.view({num_hosts, -1});
    std::vector<comm::WorkPtr> works;
    for (int64_t host = 0; host < num_hosts; ++host) {
      within_->stamp_next(stamp_ + static_cast<uint64_t>(host));
      works.push_back(within_->all_gather(by_host[host], crossed[host]));
    }
    for (const comm::WorkPtr& work : works) {
      comm::wait_for(*work, patience, *within_, what + " within a host");
    }
    work_.reset();
    crossed_.reset();
  }

 private:
  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
  const at::Tensor output_;
  const uint64_t stamp_;
  at::Tensor crossed_;
  comm::WorkPtr work_;
};

class GathersInTwoHops final : public GatherGroup {
 public:
  GathersInTwoHops(comm::CommunicatorPtr across, comm::CommunicatorPtr within)
      : across_(std::move(across)), within_(std::move(within)) {}

  int group_rank() const override {
    return across_->group_rank() * within_->size() + within_->group_rank();
  }
  int size() const override { return across_->size() * within_->size(); }

  GatherPtr all_gather(at::Tensor output, at::Tensor input,
                       uint64_t stamp) override {
    return std::make_unique<GatherInTwoHops>(across_, within_,
                                             std::move(output), input, stamp);
  }

 private:
  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
};

}  // namespace

GatherGroupPtr make_flat_gathers(comm::CommunicatorPtr group) {
  return std::make_shared<GathersInOneHop>(std::move(group));
}

GatherGroupPtr make_hierarchical_gathers(comm::CommunicatorPtr across,
                                         comm::CommunicatorPtr within) {
  return std::make_shared<GathersInTwoHops>(std::move(across),
                                            std::move(within));
}

}  // namespace smp::parameters
