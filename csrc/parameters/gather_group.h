#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"

namespace smp::parameters {

/// A gather in flight, whose tensors may be read after `follow`, or another
/// exchange of the group.
class Gather {
 public:
  virtual ~Gather() = default;
  /// Waits like `comm::follow`: on a device the host does not wait. One thread
  /// at a time; may be called again.
  /// @throws Disagreement when another rank has called something else
  virtual void follow(const comm::WaitOptions& wait,
                      const std::string& what) = 0;
};

using GatherPtr = std::unique_ptr<Gather>;

/// The ranks that hold one copy of a sharded state together.
class GatherGroup {
 public:
  virtual ~GatherGroup() = default;
  virtual int group_rank() const = 0;
  virtual int size() const = 0;
  /// Gathers bytes of all ranks, in the order of the ranks. Collective; returns
  /// at once.
  /// @param output  [size * n], uint8
  /// @param input   [n], uint8
  /// @param stamp   equal on all ranks, see `compare`
  virtual GatherPtr all_gather(at::Tensor output, at::Tensor input,
                               uint64_t stamp) = 0;
  /// Begins to compare the stamp of the gathers that follow; no gather can be
  /// used when it differs. Only hosts exchange messages. Collective; returns at
  /// once.
  /// @return null where `all_gather` itself compares
  virtual GatherPtr compare(uint64_t stamp) = 0;
  /// Compares a stamp where nothing is gathered. Collective; returns at once.
  virtual GatherPtr meet(uint64_t stamp) = 0;
};

using GatherGroupPtr = std::shared_ptr<GatherGroup>;

/// Makes a group with one all-gather over all ranks.
/// @param control  the same ranks, for tensors of the host; null: `group`
GatherGroupPtr make_flat_gathers(comm::CommunicatorPtr group,
                                 comm::CommunicatorPtr control = nullptr);

/// Makes a group that gathers first between hosts, then within them, so that
/// each part crosses the border of a host once instead of once per rank of it.
/// The result is the same. For devices; on the host a group that goes by hosts
/// gathers like that by itself (`comm::make_hierarchical_communicator`).
/// Rank `across.group_rank() * within.size() + within.group_rank()` of the
/// whole group.
/// @param across  ranks with equal places on their hosts, in the order of hosts
/// @param within  the ranks of this host
/// @param control  all ranks, for tensors of the host
/// Source: arXiv:2205.00119, section 3.3 (MiCS).
GatherGroupPtr make_hierarchical_gathers(comm::CommunicatorPtr across,
                                         comm::CommunicatorPtr within,
                                         comm::CommunicatorPtr control);

}  // namespace smp::parameters
