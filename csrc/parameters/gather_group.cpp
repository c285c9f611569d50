#include "csrc/parameters/gather_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

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

  void follow(const comm::WaitOptions& wait, const std::string& what) override {
    if (!work_) return;
    comm::follow(*work_, wait, *group_, what);
    work_.reset();
  }

 private:
  const comm::CommunicatorPtr group_;
  comm::WorkPtr work_;
};

// Sends the stamp of each rank to the next one: as fast in a large group as in
// a small one. Where ranks differ, two neighbours do.
class NeighbourStamps final : public Gather {
 public:
  NeighbourStamps(comm::CommunicatorPtr group, uint64_t stamp)
      : group_(std::move(group)),
        previous_((group_->group_rank() + group_->size() - 1) % group_->size()),
        own_(at::full({1}, static_cast<int64_t>(stamp), at::kLong)),
        theirs_(at::empty_like(own_)) {
    const int next = (group_->group_rank() + 1) % group_->size();
    works_ = {group_->send(own_, next, kTag),
              group_->recv(theirs_, previous_, kTag)};
  }

  void follow(const comm::WaitOptions& wait, const std::string& what) override {
    for (const comm::WorkPtr& work : works_) {
      comm::wait_for(*work, wait, *group_, what);
    }
    works_.clear();
    const auto theirs = *theirs_.const_data_ptr<int64_t>();
    if (theirs == *own_.const_data_ptr<int64_t>()) return;
    throw comm::Disagreement(
        detail::concat(rank_prefix(), what, ": group rank ", previous_, " of ",
                       group_->name(), " has called something else"),
        {previous_, static_cast<uint64_t>(theirs)});
  }

 private:
  static constexpr int kTag = 1;

  const comm::CommunicatorPtr group_;
  const int previous_;
  const at::Tensor own_;
  const at::Tensor theirs_;
  std::vector<comm::WorkPtr> works_;
};

class GathersInOneHop final : public GatherGroup {
 public:
  GathersInOneHop(comm::CommunicatorPtr group, comm::CommunicatorPtr control)
      : group_(std::move(group)),
        control_(control ? std::move(control) : group_) {}

  int group_rank() const override { return group_->group_rank(); }
  int size() const override { return group_->size(); }

  GatherPtr all_gather(at::Tensor output, at::Tensor input,
                       uint64_t stamp) override {
    group_->stamp_next(stamp);
    return std::make_unique<GatherInOneHop>(
        group_, group_->all_gather(std::move(output), input));
  }

  GatherPtr compare(uint64_t stamp) override {
    if (group_->stamp_next(stamp)) return nullptr;
    return std::make_unique<NeighbourStamps>(control_, stamp);
  }

  GatherPtr meet(uint64_t stamp) override {
    if (GatherPtr comparison = compare(stamp)) return comparison;
    return std::make_unique<GatherInOneHop>(group_, group_->barrier());
  }

 private:
  const comm::CommunicatorPtr group_;
  const comm::CommunicatorPtr control_;
};

// Issues the second half right behind the first one, on a stream of its own,
// because work computed meanwhile waits for neither.
class GatherInTwoHops final : public Gather {
 public:
  GatherInTwoHops(comm::CommunicatorPtr across, comm::CommunicatorPtr within,
                  at::Tensor output, const at::Tensor& input,
                  memory::CopyStream& stream)
      : across_(std::move(across)),
        within_(std::move(within)),
        output_(std::move(output)),
        crossed_(
            at::empty({across_->size() * input.numel()}, input.options())) {
    stream.run(memory::Mark::none(), [&] {
      work_ = across_->all_gather(crossed_, input);
      const bool is_ordered = work_->order_stream();
      SMP_ASSERT(is_ordered, "a gather over ", across_->name());
      spread();
    });
  }

  void follow(const comm::WaitOptions& wait, const std::string& what) override {
    if (!work_) return;
    for (const comm::WorkPtr& work : works_) {
      comm::follow(*work, wait, *within_, what + " within a host");
    }
    work_.reset();
    works_.clear();
    crossed_.reset();
  }

 private:
  void spread() {
    const int64_t num_hosts = across_->size();
    const at::Tensor by_host = output_.view({num_hosts, -1});
    const at::Tensor crossed = crossed_.view({num_hosts, -1});
    for (int64_t host = 0; host < num_hosts; ++host) {
      works_.push_back(within_->all_gather(by_host[host], crossed[host]));
    }
  }

  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
  const at::Tensor output_;
  at::Tensor crossed_;
  // Keeps the input, which the device may read until `follow`.
  comm::WorkPtr work_;
  std::vector<comm::WorkPtr> works_;  // of the second half, by host
};

class GathersInTwoHops final : public GatherGroup {
 public:
  GathersInTwoHops(comm::CommunicatorPtr across, comm::CommunicatorPtr within,
                   comm::CommunicatorPtr control)
      : across_(std::move(across)),
        within_(std::move(within)),
        control_(std::move(control)) {}

  int group_rank() const override {
    return across_->group_rank() * within_->size() + within_->group_rank();
  }
  int size() const override { return across_->size() * within_->size(); }

  GatherPtr all_gather(at::Tensor output, at::Tensor input,
                       uint64_t /*stamp*/) override {
    if (!stream_) stream_.emplace(output.device());
    return std::make_unique<GatherInTwoHops>(
        across_, within_, std::move(output), input, *stream_);
  }

  GatherPtr compare(uint64_t stamp) override {
    return std::make_unique<NeighbourStamps>(control_, stamp);
  }

  GatherPtr meet(uint64_t stamp) override { return compare(stamp); }

 private:
  const comm::CommunicatorPtr across_;
  const comm::CommunicatorPtr within_;
  const comm::CommunicatorPtr control_;
  std::optional<memory::CopyStream> stream_;  // between the halves
};

}  // namespace

GatherGroupPtr make_flat_gathers(comm::CommunicatorPtr group,
                                 comm::CommunicatorPtr control) {
  return std::make_shared<GathersInOneHop>(std::move(group),
                                           std::move(control));
}

GatherGroupPtr make_hierarchical_gathers(comm::CommunicatorPtr across,
                                         comm::CommunicatorPtr within,
                                         comm::CommunicatorPtr control) {
  SMP_CHECK_VALUE(across->is_stream_ordered() && within->is_stream_ordered(),
                  "gathers in two hops are of devices, got ", across->name(),
                  " and ", within->name(),
                  "; for the host see make_hierarchical_communicator");
  return std::make_shared<GathersInTwoHops>(
      std::move(across), std::move(within), std::move(control));
}

}  // namespace smp::parameters
