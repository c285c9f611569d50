#include "csrc/mailbox/wire.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "csrc/lanes/lane_table.h"
#include "tests/fuzz/cpp/decoder.h"

// Decoder of the mailbox: a header and its blob, as a packet and in two parts.

namespace smp::lanes {

// A stub that is never called without lanes. It saves compiling the lanes.
at::Tensor LaneTable::new_payload(const Descriptor&) {
  fuzz::fail("a lane where there is none");
}

}  // namespace smp::lanes

namespace smp::fuzz {
namespace {

using mailbox::Message;
namespace wire = mailbox::wire;

constexpr int kSource = 3;

void check_again(const Message& message) {
  const wire::Parts parts = wire::take_apart(message);
  std::vector<uint8_t> blob(static_cast<size_t>(parts.blob_bytes));
  wire::write_blob(message, parts, blob.data());
  wire::Header header = wire::decode_header(parts.header, kSource);
  wire::decode_blob(blob, header);
  const Message& again = header.message;
  require(again.channel == message.channel && again.fields == message.fields &&
              again.bytes == message.bytes &&
              again.tensors.size() == message.tensors.size(),
          "a message is another one when it is written and read again");
  for (size_t i = 0; i < again.tensors.size(); ++i) {
    const auto& one = again.tensors[i];
    const auto& other = message.tensors[i];
    require(one.requires_grad == other.requires_grad &&
                one.data.defined() == other.data.defined() &&
                (!one.data.defined() ||
                 (one.data.sizes() == other.data.sizes() &&
                  one.data.scalar_type() == other.data.scalar_type())),
            "a tensor is another one when it is written and read again");
  }
}

bool reads_packet(std::span<const uint8_t> input) {
  try {
    wire::Header header = wire::decode_packet(input, kSource);
    if (!header.blob_is_inline) return true;
    wire::decode_blob(header.inline_blob, header);
  } catch (const wire::CorruptMessage&) {
    return false;
  }
  return true;
}

}  // namespace

bool understands(std::span<const uint8_t> input) {
  (void)reads_packet(input);
  try {
    wire::Header header = wire::decode_header(input, kSource);
    const std::vector<at::Tensor> large =
        wire::decode_blob(input.subspan(wire::kHeaderBytes), header);
    int64_t large_bytes = 0;
    for (const at::Tensor& tensor : large) large_bytes += tensor.numel();
    require(large_bytes == header.large_bytes,
            "large tensors have other sizes");
    if (large.empty()) check_again(header.message);
  } catch (const wire::CorruptMessage&) {
    return false;
  }
  return true;
}

}  // namespace smp::fuzz
