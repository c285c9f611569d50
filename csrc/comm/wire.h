#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/comm/message.h"
#include "csrc/common/check.h"

namespace smp::comm::wire {

// A Message travels as
//   packet   kPacketBytes, always: header, and the blob when it fits
//   blob     only when it does not fit: bytes, tensor descriptors, small
//            tensors
//   tensors  each tensor above kSmallTensorBytes as a message of its own
// so that most messages of a run are one transport message, and large tensors
// are sent from and received into their own memory.

/// Room for a tensor of 16 KiB next to headers. Over Gloo a second transport
/// message costs 150 us of a round trip, a packet of this size instead of 4 KiB
/// about 10 us.
inline constexpr int64_t kPacketBytes = 17 * 1024;
inline constexpr int64_t kSmallTensorBytes = 32 * 1024;

/// A message whose bytes make no sense; the text names the sender.
class CorruptMessage : public Error {
  using Error::Error;
};

/// All tensors are one-dimensional uint8 on the CPU.
struct Encoded {
  at::Tensor packet;
  at::Tensor blob;                ///< undefined when it is in the packet
  std::vector<at::Tensor> large;  ///< share memory with the message's tensors

  int64_t num_bytes() const;
};

/// Tensors may have any dtype, strides and device; those on a device are
/// copied to the host in the order of the current stream.
/// @throws ValueError for tensors that are not dense
Encoded encode(const Message& message);

/// The number of this message between two ranks, to notice a lost one.
void set_sequence(const at::Tensor& packet, uint64_t sequence);

/// What the packet tells.
struct Header {
  Message message;  ///< channel and fields; the rest follows from the blob
  uint64_t sequence = 0;
  int64_t num_tensors = 0;
  int64_t structure_bytes = 0;
  int64_t blob_bytes = 0;
  int64_t large_bytes = 0;
  std::span<const uint8_t> inline_blob;  ///< into the packet
  bool blob_is_inline = false;
};

/// @param source_rank  who sent it; becomes `message.source_rank`
/// @throws CorruptMessage
Header decode_packet(std::span<const uint8_t> packet, int source_rank);

/// Fills `header.message.bytes` and `.tensors`.
/// @return for each tensor that is still to come its memory as uint8
/// @throws CorruptMessage
std::vector<at::Tensor> decode_blob(std::span<const uint8_t> blob,
                                    Header& header);

}  // namespace smp::comm::wire
