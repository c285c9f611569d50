#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/lanes/descriptor.h"
#include "csrc/memory/mark.h"

namespace smp::mailbox {

/// The handler of a message on arrival.
enum class Channel : int64_t {
  kPipeline = 0,  ///< module server: requests, responses, notices
  kOrder = 1,     ///< agreed order of tasks (deterministic server)
  kObject = 2,    ///< smp.send / broadcast / recv_from and object collectives
  kProbe = 3,     ///< measures the way to another rank (LinkProbe)
  kLane = 4,      ///< slots of lanes that are free again (LanePosts)
  kCount = 5,
};

/// The name of a tensor on any rank: its maker and its number there.
struct Ref {
  int32_t owner_rank = -1;
  int64_t id = -1;
};

/// A tensor of a message. The data follow in the payload.
struct MessageTensor {
  at::Tensor data = {};        ///< may be undefined (no gradient)
  bool requires_grad = false;  ///< of the sender's tensor
  Ref ref = {};
  /// The sender promises not to write to `data` until it is sent, so that a
  /// message that waits need not copy it. Does not travel.
  bool is_stable = false;
  /// Point from which `data` may be read. Does not travel: on arrival it is the
  /// mark of the data here.
  memory::Mark mark = {};
  /// Set between `post` and the handler when a lane has the data. `data` is
  /// then the lane's payload in the message.
  std::shared_ptr<const lanes::Descriptor> lane = {};
};

/// The content sent between ranks: ten integers that belong to the channel
/// (kind, step, microbatch, call id ... as `pipeline/wire.h` defines), a byte
/// string (pickled structure or object), and tensors.
struct Message {
  static constexpr int kNumFields = 10;
  Channel channel = Channel::kObject;
  std::array<int64_t, kNumFields> fields{};
  std::string bytes;
  std::vector<MessageTensor> tensors;
  int source_rank = -1;  ///< global rank of the sender, filled on arrival
};

}  // namespace smp::mailbox
