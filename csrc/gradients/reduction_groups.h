#pragma once

#include <utility>
#include <vector>

#include "csrc/gradients/reducer_options.h"

namespace smp::gradients {

/// The groups of ranks over which a reducer sums, and the group in which hosts
/// exchange messages.
class ReductionGroups {
 public:
  /// @param dp       may be null, like a group of one
  /// @param options  must outlive this object
  ReductionGroups(comm::CommunicatorPtr dp, const ReducerOptions& options)
      : dp_(std::move(dp)), options_(options) {}

  bool has_peers() const { return dp_ && dp_->size() > 1; }
  /// Returns whether sums end in the order of a stream; the host waits for
  /// none.
  bool is_stream_ordered() const {
    return has_peers() && dp_->is_stream_ordered();
  }
  const comm::CommunicatorPtr& all() const { return dp_; }
  comm::Communicator& control() const {
    return options_.control ? *options_.control : *dp_;
  }
  /// Returns the group of the first sum.
  comm::Communicator& first() const {
    return options_.is_sharded() ? *options_.sharding->shard : *dp_;
  }
  /// Returns the groups of the sums after the first one, in this order.
  std::vector<comm::CommunicatorPtr> further() const {
    return options_.is_sharded() ? options_.sharding->further
                                 : std::vector<comm::CommunicatorPtr>();
  }
  const comm::WaitOptions& wait_options() const { return options_.wait; }

 private:
  const comm::CommunicatorPtr dp_;
  const ReducerOptions& options_;
};

}  // namespace smp::gradients
