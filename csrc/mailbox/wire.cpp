#include "csrc/mailbox/wire.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "csrc/lanes/lane_table.h"

namespace smp::mailbox::wire {
namespace {

// Fixed first part of each packet. All ranks of a run have the same byte order.
struct Prefix {
  uint32_t magic;
  uint32_t num_fields;
  uint64_t sequence;
  int64_t channel;
  int64_t fields[Message::kNumFields];
  int64_t num_tensors;
  int64_t structure_bytes;
  int64_t blob_bytes;
  int64_t large_bytes;  // of all tensors that are sent on their own
};

struct Descriptor {
  int64_t ref_id;
  int32_t ref_owner;
  uint8_t flags;
  int8_t dtype;
  uint8_t num_dims;
  uint8_t reserved;
};

// A record after the sizes of a tensor that comes over a lane.
struct LaneRecord {
  int64_t sequence;
  int32_t slot;
  uint8_t lane;
  uint8_t reserved[3];
};

static_assert(sizeof(Prefix) == kHeaderBytes);

constexpr uint32_t kMagic = 0x31504d53;  // "SMP1"
constexpr int64_t kInlineBytes = kPacketBytes - kHeaderBytes;
constexpr int kMaxDims = 64;
constexpr uint8_t kDefined = 1;
constexpr uint8_t kRequiresGrad = 2;
constexpr uint8_t kOnLane = 4;
constexpr uint8_t kAllFlags = kDefined | kRequiresGrad | kOnLane;

at::TensorOptions byte_options() { return at::TensorOptions(at::kByte); }

class Writer {
 public:
  explicit Writer(uint8_t* out) : out_(out) {}

  void put(const void* data, size_t size) {
    if (size > 0) std::memcpy(out_, data, size);
    out_ += size;
  }

 private:
  uint8_t* out_;
};

// Reads the bytes of another process, and checks every value.
class Reader {
 public:
  Reader(std::span<const uint8_t> in, int source_rank)
      : in_(in), source_rank_(source_rank) {}

  std::span<const uint8_t> take(int64_t size, const char* what) {
    require(size >= 0 && static_cast<uint64_t>(size) <= in_.size(), what,
            " needs ", size, " bytes, ", in_.size(), " are left");
    const auto taken = in_.first(static_cast<size_t>(size));
    in_ = in_.subspan(taken.size());
    return taken;
  }

  void get(void* to, size_t size, const char* what) {
    const auto bytes = take(static_cast<int64_t>(size), what);
    if (size > 0) std::memcpy(to, bytes.data(), size);
  }

  std::span<const uint8_t> rest() const { return in_; }

  template <typename... Parts>
  void require(bool is_right, const Parts&... parts) const {
    SMP_THROW_IF_NOT(CorruptMessage, is_right, "message from global_rank ",
                     source_rank_, " is corrupt: ", parts...,
                     "; ranks that run different versions of smp or torch "
                     "cannot work together");
  }

 private:
  std::span<const uint8_t> in_;
  int source_rank_;
};

at::Tensor sendable(const at::Tensor& tensor) {
  SMP_CHECK_VALUE(
      tensor.layout() == at::kStrided && !tensor.is_quantized(),
      "only dense tensors can be sent to another rank, got one with layout ",
      tensor.layout(), tensor.is_quantized() ? " (quantized)" : "",
      "; pass tensor.to_dense() or tensor.dequantize()");
  SMP_CHECK_VALUE(!tensor.is_meta(),
                  "a tensor on the meta device has no data to send to another "
                  "rank; materialise it first");
  SMP_CHECK_VALUE(tensor.dim() <= kMaxDims, "a tensor with ", tensor.dim(),
                  " dims cannot be sent to another rank, the limit is ",
                  kMaxDims);
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() &&
      !tensor.is_neg()) {
    return tensor;
  }
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

int64_t num_bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// Returns the memory of a contiguous tensor, which lives as long as the result.
at::Tensor as_bytes(const at::Tensor& tensor) {
  // Const, so that a lazy copy need not be made before it is sent.
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), {num_bytes_of(tensor)},
      [tensor](void*) {}, byte_options());
}

// Returns whether a tensor is announced; a lane's may have no data in the
// message.
bool is_announced(const MessageTensor& tensor) {
  return tensor.data.defined() || tensor.lane;
}

at::IntArrayRef sizes_of(const MessageTensor& tensor) {
  return tensor.lane ? at::IntArrayRef(tensor.lane->sizes)
                     : tensor.data.sizes();
}

Descriptor describe(const MessageTensor& tensor) {
  Descriptor result{};
  result.ref_id = tensor.ref.id;
  result.ref_owner = tensor.ref.owner_rank;
  if (tensor.requires_grad) result.flags |= kRequiresGrad;
  if (tensor.lane) result.flags |= kOnLane;
  if (is_announced(tensor)) {
    result.flags |= kDefined;
    result.dtype = static_cast<int8_t>(tensor.lane ? tensor.lane->dtype
                                                   : tensor.data.scalar_type());
    result.num_dims = static_cast<uint8_t>(sizes_of(tensor).size());
  }
  return result;
}

LaneRecord record_of(const lanes::Descriptor& descriptor) {
  LaneRecord record{};
  record.sequence = descriptor.sequence;
  record.slot = descriptor.slot;
  record.lane = static_cast<uint8_t>(descriptor.lane);
  return record;
}

// Checks that the product of the sizes fits into 63 bits, and returns the
// bytes.
int64_t bytes_of_sizes(const std::vector<int64_t>& sizes, int64_t item_bytes,
                       const Reader& reader) {
  int64_t total = item_bytes;
  for (const int64_t size : sizes) {
    reader.require(size >= 0, "a tensor dim has size ", size);
    reader.require(!__builtin_mul_overflow(total, size, &total),
                   "a tensor has more than 2^63 bytes");
  }
  return total;
}

// A tensor as announced, before its memory is allocated.
struct Announced {
  Descriptor descriptor;
  std::vector<int64_t> sizes;
  int64_t num_bytes = 0;
  int64_t message_bytes = 0;  // of them in the message
  LaneRecord lane;

  bool is_defined() const { return (descriptor.flags & kDefined) != 0; }
  bool is_on_lane() const { return (descriptor.flags & kOnLane) != 0; }
  bool is_large() const { return message_bytes > kSmallTensorBytes; }
  at::ScalarType dtype() const {
    return static_cast<at::ScalarType>(descriptor.dtype);
  }
};

Announced read_announced(Reader& reader) {
  Announced tensor{};
  Descriptor& descriptor = tensor.descriptor;
  reader.get(&descriptor, sizeof(descriptor), "a tensor descriptor");
  reader.require((descriptor.flags & ~kAllFlags) == 0,
                 "a tensor has unknown flags ",
                 static_cast<int>(descriptor.flags));
  if (!tensor.is_defined()) return tensor;
  reader.require(descriptor.num_dims <= kMaxDims, "a tensor has ",
                 static_cast<int>(descriptor.num_dims), " dims");
  const at::ScalarType dtype = tensor.dtype();
  reader.require(descriptor.dtype >= 0 && dtype < at::ScalarType::Undefined &&
                     !c10::isQIntType(dtype),
                 "a tensor has dtype number ",
                 static_cast<int>(descriptor.dtype));
  tensor.sizes.resize(descriptor.num_dims);
  reader.get(tensor.sizes.data(), tensor.sizes.size() * sizeof(int64_t),
             "tensor sizes");
  try {
    const auto item_bytes = static_cast<int64_t>(c10::elementSize(dtype));
    tensor.num_bytes = bytes_of_sizes(tensor.sizes, item_bytes, reader);
  } catch (const c10::Error& error) {
    reader.require(false, error.what_without_backtrace());
  }
  tensor.message_bytes = tensor.num_bytes;
  if (!tensor.is_on_lane()) return tensor;
  reader.get(&tensor.lane, sizeof(tensor.lane), "a descriptor of a lane");
  reader.require(
      tensor.lane.lane >= 1 && tensor.lane.lane <= lanes::kMaxLaneKind,
      "a tensor comes over lane number ", static_cast<int>(tensor.lane.lane));
  if (!lanes::is_in_messages(static_cast<lanes::LaneKind>(tensor.lane.lane))) {
    tensor.message_bytes = 0;
  }
  return tensor;
}

std::shared_ptr<const lanes::Descriptor> lane_of(const Announced& announced) {
  return std::make_shared<const lanes::Descriptor>(lanes::Descriptor{
      .lane = static_cast<lanes::LaneKind>(announced.lane.lane),
      .slot = announced.lane.slot,
      .sequence = announced.lane.sequence,
      .num_bytes = announced.num_bytes,
      .dtype = announced.dtype(),
      .sizes = announced.sizes});
}

MessageTensor make_tensor(const Announced& announced, Reader& reader,
                          lanes::LaneTable* lanes) {
  const Descriptor& descriptor = announced.descriptor;
  MessageTensor tensor;
  tensor.requires_grad = (descriptor.flags & kRequiresGrad) != 0;
  tensor.ref = {descriptor.ref_owner, descriptor.ref_id};
  if (!announced.is_defined()) return tensor;
  try {
    if (announced.is_on_lane()) {
      reader.require(lanes != nullptr,
                     "a tensor comes over a lane, and this rank has none");
      tensor.lane = lane_of(announced);
      tensor.data = lanes->new_payload(*tensor.lane);
    } else {
      tensor.data =
          at::empty(announced.sizes, at::TensorOptions(announced.dtype()));
    }
  } catch (const c10::Error& error) {
    reader.require(false, "cannot make a tensor of ", announced.num_bytes,
                   " bytes: ", error.what_without_backtrace());
  }
  if (!announced.is_large() && announced.message_bytes > 0) {
    reader.get(tensor.data.mutable_data_ptr(), tensor.data.nbytes(),
               "tensor data");
  }
  return tensor;
}

}  // namespace

int64_t Parts::num_bytes() const {
  int64_t total = kHeaderBytes + blob_bytes;
  for (const Large& one : large) total += num_bytes_of(one.data);
  return total;
}

int64_t Encoded::num_bytes() const {
  int64_t total = num_bytes_of(packet);
  if (blob.defined()) total += num_bytes_of(blob);
  for (const at::Tensor& tensor : large) total += num_bytes_of(tensor);
  return total;
}

Parts take_apart(const Message& message) {
  at::NoGradGuard no_grad;
  Parts parts;
  parts.data.reserve(message.tensors.size());
  Prefix prefix{};
  prefix.blob_bytes = static_cast<int64_t>(message.bytes.size());
  for (const MessageTensor& tensor : message.tensors) {
    prefix.blob_bytes += static_cast<int64_t>(sizeof(Descriptor));
    parts.data.push_back(tensor.data.defined() ? sendable(tensor.data)
                                               : at::Tensor());
    if (!is_announced(tensor)) continue;
    prefix.blob_bytes += sizes_of(tensor).size() * sizeof(int64_t);
    if (tensor.lane) prefix.blob_bytes += sizeof(LaneRecord);
    if (!tensor.data.defined()) continue;
    const at::Tensor& data = parts.data.back();
    const int64_t tensor_bytes = num_bytes_of(data);
    if (tensor_bytes <= kSmallTensorBytes) {
      prefix.blob_bytes += tensor_bytes;
      continue;
    }
    prefix.large_bytes += tensor_bytes;
    parts.large.push_back(
        {data, !tensor.is_stable && data.is_alias_of(tensor.data)});
  }
  prefix.magic = kMagic;
  prefix.num_fields = Message::kNumFields;
  prefix.channel = static_cast<int64_t>(message.channel);
  std::memcpy(prefix.fields, message.fields.data(), sizeof(prefix.fields));
  prefix.num_tensors = static_cast<int64_t>(message.tensors.size());
  prefix.structure_bytes = static_cast<int64_t>(message.bytes.size());
  parts.blob_bytes = prefix.blob_bytes;
  std::memcpy(parts.header.data(), &prefix, sizeof(prefix));
  return parts;
}

void write_blob(const Message& message, const Parts& parts, uint8_t* out) {
  Writer writer(out);
  writer.put(message.bytes.data(), message.bytes.size());
  for (const MessageTensor& tensor : message.tensors) {
    const Descriptor descriptor = describe(tensor);
    writer.put(&descriptor, sizeof(descriptor));
    if (!is_announced(tensor)) continue;
    const auto sizes = sizes_of(tensor);
    writer.put(sizes.data(), sizes.size() * sizeof(int64_t));
    if (!tensor.lane) continue;
    const LaneRecord record = record_of(*tensor.lane);
    writer.put(&record, sizeof(record));
  }
  for (const at::Tensor& tensor : parts.data) {
    if (!tensor.defined() || num_bytes_of(tensor) > kSmallTensorBytes) continue;
    writer.put(tensor.const_data_ptr(), tensor.nbytes());
  }
}

Encoded encode(const Message& message) {
  at::NoGradGuard no_grad;
  const Parts parts = take_apart(message);
  Encoded result;
  for (const Parts::Large& one : parts.large) {
    result.large.push_back(
        as_bytes(one.is_callers ? one.data.clone() : one.data));
  }
  result.packet = at::empty({kPacketBytes}, byte_options());
  auto* packet = result.packet.mutable_data_ptr<uint8_t>();
  std::memcpy(packet, parts.header.data(), parts.header.size());
  uint8_t* rest = packet + kHeaderBytes;
  if (parts.blob_bytes <= kInlineBytes) {
    write_blob(message, parts, rest);
    // Zeroed, so that old memory does not leak out.
    std::memset(rest + parts.blob_bytes, 0,
                static_cast<size_t>(kInlineBytes - parts.blob_bytes));
  } else {
    std::memset(rest, 0, kInlineBytes);
    result.blob = at::empty({parts.blob_bytes}, byte_options());
    write_blob(message, parts, result.blob.mutable_data_ptr<uint8_t>());
  }
  return result;
}

void set_sequence(uint8_t* begin, uint64_t sequence) {
  std::memcpy(begin + offsetof(Prefix, sequence), &sequence, sizeof(sequence));
}

Header decode_header(std::span<const uint8_t> bytes, int source_rank) {
  Reader reader(bytes, source_rank);
  Prefix prefix{};
  reader.get(&prefix, sizeof(prefix), "the header");
  reader.require(
      prefix.magic == kMagic && prefix.num_fields == Message::kNumFields,
      "it does not begin like a message");
  reader.require(prefix.channel >= 0 &&
                     prefix.channel < static_cast<int64_t>(Channel::kCount),
                 "there is no channel ", prefix.channel);
  // Each tensor takes a descriptor, so a wrong number of them cannot allocate
  // more than the blob itself.
  reader.require(
      prefix.blob_bytes >= 0 && prefix.structure_bytes >= 0 &&
          prefix.structure_bytes <= prefix.blob_bytes &&
          prefix.num_tensors >= 0 &&
          prefix.num_tensors <= (prefix.blob_bytes - prefix.structure_bytes) /
                                    static_cast<int64_t>(sizeof(Descriptor)),
      "sizes do not agree (", prefix.blob_bytes, " bytes with ",
      prefix.structure_bytes, " bytes of structure and ", prefix.num_tensors,
      " tensors)");
  Header header;
  header.message.channel = static_cast<Channel>(prefix.channel);
  header.message.source_rank = source_rank;
  std::memcpy(header.message.fields.data(), prefix.fields,
              sizeof(prefix.fields));
  header.sequence = prefix.sequence;
  header.num_tensors = prefix.num_tensors;
  header.structure_bytes = prefix.structure_bytes;
  header.blob_bytes = prefix.blob_bytes;
  header.large_bytes = prefix.large_bytes;
  return header;
}

Header decode_packet(std::span<const uint8_t> packet, int source_rank) {
  Header header = decode_header(packet, source_rank);
  header.blob_is_inline = header.blob_bytes <= kInlineBytes;
  if (header.blob_is_inline) {
    Reader reader(packet.subspan(kHeaderBytes), source_rank);
    header.inline_blob = reader.take(header.blob_bytes, "the payload");
  }
  return header;
}

void check_sequence(const Header& header, uint64_t expected,
                    const std::string& transport) {
  SMP_THROW_IF_NOT(CorruptMessage, header.sequence == expected,
                   "expected message ", expected, " from global_rank ",
                   header.message.source_rank, ", got message ",
                   header.sequence, ": one was lost, or somebody else uses ",
                   transport);
}

std::vector<at::Tensor> decode_blob(std::span<const uint8_t> blob,
                                    Header& header, lanes::LaneTable* lanes) {
  Message& message = header.message;
  Reader reader(blob, message.source_rank);
  reader.require(static_cast<int64_t>(blob.size()) == header.blob_bytes,
                 "expected ", header.blob_bytes, " bytes, got ", blob.size());
  const auto structure = reader.take(header.structure_bytes, "the structure");
  message.bytes.assign(structure.begin(), structure.end());
  message.tensors.clear();
  std::vector<Announced> announced;
  int64_t large_bytes = 0;
  for (int64_t i = 0; i < header.num_tensors; ++i) {
    announced.push_back(read_announced(reader));
    if (!announced.back().is_large()) continue;
    reader.require(
        !__builtin_add_overflow(large_bytes, announced.back().message_bytes,
                                &large_bytes),
        "its tensors have more than 2^63 bytes");
  }
  // Checked before any allocation, which a wrong size could make huge.
  reader.require(large_bytes == header.large_bytes, "its large tensors have ",
                 large_bytes, " bytes, its header says ", header.large_bytes);
  std::vector<at::Tensor> large;
  for (const Announced& tensor : announced) {
    message.tensors.push_back(make_tensor(tensor, reader, lanes));
    if (tensor.is_large()) {
      large.push_back(as_bytes(message.tensors.back().data));
    }
  }
  reader.require(reader.rest().empty(), reader.rest().size(),
                 " bytes are left over");
  return large;
}

}  // namespace smp::mailbox::wire
