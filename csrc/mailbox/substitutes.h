#pragma once

#include <functional>
#include <optional>

#include "csrc/common/check.h"
#include "csrc/lanes/lane_table.h"

namespace smp::mailbox {

/// The place where the transport of a rank pauses.
enum class PausePlace { kPost, kDeliver, kPublish };
using Pause = std::function<void(PausePlace)>;

/// Parts that a library of tests puts into the mailboxes of this process. The
/// product has none of them: every function is empty.
struct Substitutes {
  /// Returns lanes that replace those of a device, if a mailbox is to have any.
  std::function<std::optional<lanes::LaneSource>()> lanes;
  /// Returns the pause of one rank.
  std::function<Pause(int global_rank)> pause;
};

/// Returns the parts of all later mailboxes; set them before the first one.
SMP_EXPORT Substitutes& substitutes();

}  // namespace smp::mailbox
