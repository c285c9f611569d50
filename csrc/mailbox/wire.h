#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/mailbox/message.h"

namespace smp::lanes {
class LaneTable;
}

namespace smp::mailbox::wire {

// A Message travels as
//   header   kHeaderBytes
//   blob     bytes, tensor descriptors, small tensors
//   tensors  each tensor above kSmallTensorBytes, straight from its own memory
//            into its own memory
// one after the other through shared memory. A communicator, where each
// transport message costs, takes header and blob together as a packet of
// kPacketBytes, or the blob as a message of its own when it does not fit.

inline constexpr int64_t kHeaderBytes = 136;
/// Room for a tensor of 16 KiB next to headers. Over Gloo a second transport
/// message costs 150 us of a round trip, a packet of this size instead of 4 KiB
/// about 10 us.
inline constexpr int64_t kPacketBytes = 17 * 1024;
inline constexpr int64_t kSmallTensorBytes = 32 * 1024;

/// A message with malformed bytes; the text names the sender.
class CorruptMessage : public Error {
  using Error::Error;
};

/// A message in parts, before it is copied anywhere.
struct Parts {
  struct Large {
    at::Tensor data;
    /// Set if the memory is the caller's, who may write to it at any time.
    bool is_callers = false;
  };

  std::array<uint8_t, kHeaderBytes> header;
  int64_t blob_bytes = 0;
  std::vector<at::Tensor> data;  ///< of all tensors; contiguous, on the CPU
  std::vector<Large> large;      ///< those of `data` that travel on their own

  int64_t num_bytes() const;
};

/// Splits a message into parts. Tensors may have any dtype, strides and device;
/// those on a device are copied to the host in the order of the current stream.
/// Marks must be over.
/// @throws ValueError for tensors that are not dense
Parts take_apart(const Message& message);

/// Writes `parts.blob_bytes` bytes.
void write_blob(const Message& message, const Parts& parts, uint8_t* out);

/// A message for a communicator: one-dimensional uint8 tensors on the CPU.
struct Encoded {
  at::Tensor packet;
  at::Tensor blob;                ///< undefined when it is in the packet
  std::vector<at::Tensor> large;  ///< share memory with tensors that are stable

  int64_t num_bytes() const;
};

/// Encodes a message like `take_apart`; copies tensors the caller may write to.
Encoded encode(const Message& message);

/// Sets the number of this message between two ranks, which shows a lost one.
/// @param begin  start of the header, or of the packet
void set_sequence(uint8_t* begin, uint64_t sequence);

/// The contents of a header.
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

/// Decodes a header.
/// @param header       bytes of a header, at least kHeaderBytes
/// @param source_rank  sending rank; becomes `message.source_rank`
/// @throws CorruptMessage
Header decode_header(std::span<const uint8_t> header, int source_rank);

/// Decodes a packet in the same way, with the blob if it is inside.
/// @throws CorruptMessage
Header decode_packet(std::span<const uint8_t> packet, int source_rank);

/// Checks the number of a message.
/// @param transport  words for the error
/// @throws CorruptMessage when this is not the next message
void check_sequence(const Header& header, uint64_t expected,
                    const std::string& transport);

/// Fills `header.message.bytes` and `.tensors`.
/// @param lanes  lanes of this rank, for tensors that come over them; may be
///               null
/// @return for each tensor that is still to come its memory as uint8
/// @throws CorruptMessage
std::vector<at::Tensor> decode_blob(std::span<const uint8_t> blob,
                                    Header& header,
                                    lanes::LaneTable* lanes = nullptr);

}  // namespace smp::mailbox::wire
