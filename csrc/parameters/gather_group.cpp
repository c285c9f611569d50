#include "csrc/parameters/gather_group.h"

#include <ATen/ops/empty.h>

#include <optional>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/memory/copy_stream.h"

namespace smp::parameters {
namespace {

using comm::CommunicatorPtr;
using comm::WorkPtr;

class GatherInOneHop final : public Gather {
 public:
  GatherInOneHop(comm::CommunicatorPtr group, comm::WorkPtr work)
      : group_(std::move(group)), work_(std::move(work)) {}

  void follow(const comm::Patience& patience,
              const std::string& what) override {
    if (!work_) return;
    comm::follow(*work_, patience, *group_, what);
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

// The second half is issued right behind the first one, on a stream of its own,
// because what is computed meanwhile waits for neither.
class GatherInTwoHops final : public Gather {
 public:
  GatherInTwoHops(comm::CommunicatorPtr across, comm::CommunicatorPtr within,
                  at::Tensor output, const at::Tensor& input, uint64_t stamp,
                  memory::CopyStream& stream)
      : across_(std::move(across)),
        within_(std::move(within)),
        output_(std::move(output)),
        stamp_(stamp),
        crossed_(
            at::empty({across_->size() * input.numel()}, input.options())) {
    stream.run(memory::Mark::none(), [&] {
      cross(input);
      const bool is_ordered = work_->order_stream();
      SMP_ASSERT(is_ordered, "a gather over ", across_->name());
      spread();
    });
  }

  void follow(const comm::Patience& patience,
              const std::string& what) override {
    if (!work_) return;
    for (const comm::WorkPtr& work : works_) {
      comm::follow(*work, patience, *within_, what + " within a host");
    }
    work_.reset();
    works_.clear();
    crossed_.reset();
  }

 private:
  void cross(const at::Tensor& input) {
    across_->stamp_next(stamp_);
    work_ = across_->all_gather(crossed_, input);
  }

  void spread() {
    const int64_t num_hosts = across_->size();
    const at::Tensor by_host = output_.view({num_hosts, -1});
    const at::Tensor crossed = crossed_.view({num_hosts, -1});
    for (int64_t host = 0; host < num_hosts; ++host) {
      within_->stamp_next(stamp_ + static_cast<uint64_t>(host));
      works_.push_back(within_->all_gather(by_host[host], crossed[host]));
    }
  }

  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
  const at::Tensor output_;
  const uint64_t stamp_;
  at::Tensor crossed_;
  comm::WorkPtr work_;
  std::vector<comm::WorkPtr> works_;  // of the second half, by host
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
    if (!stream_) stream_.emplace(output.device());
    return std::make_unique<GatherInTwoHops>(
        across_, within_, std::move(output), input, stamp, *stream_);
  }

 private:
  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
  std::optional<memory::CopyStream> stream_;  // between the halves
};

}  // namespace

GatherGroupPtr make_flat_gathers(comm::CommunicatorPtr group) {
  return std::make_shared<GathersInOneHop>(std::move(group));
}

GatherGroupPtr make_hierarchical_gathers(comm::CommunicatorPtr across,
                                         comm::CommunicatorPtr within) {
  SMP_CHECK_VALUE(across->is_stream_ordered() && within->is_stream_ordered(),
                  "gathers in two hops are of devices, got ", across->name(),
                  " and ", within->name(),
                  "; for the host see make_hierarchical_communicator");
  return std::make_shared<GathersInTwoHops>(std::move(across),
                                            std::move(within));
}

}  // namespace smp::parameters
