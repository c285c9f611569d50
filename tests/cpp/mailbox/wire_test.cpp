#include "csrc/mailbox/wire.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "csrc/lanes/lane_table.h"
#include "tests/cpp/lanes/fake_source.h"

namespace smp::mailbox::wire {
namespace {

constexpr int kSource = 5;

std::vector<uint8_t> bytes_of(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<uint8_t>();
  return {data, data + tensor.numel()};
}

// Decodes a message as the receiver does, and copies `large` into its tensors.
Message decode(const std::vector<uint8_t>& packet,
               const std::vector<uint8_t>& blob,
               const std::vector<at::Tensor>& large) {
  Header header = decode_packet(packet, kSource);
  std::vector<at::Tensor> to_receive;
  if (header.blob_is_inline) {
    to_receive = decode_blob(header.inline_blob, header);
  } else {
    to_receive = decode_blob(blob, header);
  }
  EXPECT_EQ(to_receive.size(), large.size());
  for (size_t i = 0; i < large.size() && i < to_receive.size(); ++i) {
    to_receive[i].copy_(large[i]);
  }
  return std::move(header.message);
}

Message round_trip(const Message& message) {
  const Encoded encoded = encode(message);
  EXPECT_EQ(encoded.packet.numel(), kPacketBytes);
  return decode(
      bytes_of(encoded.packet),
      encoded.blob.defined() ? bytes_of(encoded.blob) : std::vector<uint8_t>(),
      encoded.large);
}

Message with_tensor(at::Tensor tensor) {
  Message message;
  message.tensors.push_back({std::move(tensor), false, {}});
  return message;
}

Message rich_message() {
  Message message;
  message.channel = Channel::kOrder;
  message.fields = {1, -2, 3, 4, 5, 6, 7, 8, 9, int64_t{1} << 62};
  message.bytes = std::string("structure\0with zero", 19);
  message.tensors.push_back({at::rand({3, 4}), true, {7, 11}});
  message.tensors.push_back({at::Tensor(), true, {-1, -1}});
  message.tensors.push_back({at::empty({0, 5}), false, {0, 1}});
  message.tensors.push_back({at::arange(10).sum(), false, {}});
  return message;
}

// Neither small tensors nor large ones of such a lane are in the message.
TEST(Wire, a_tensor_beside_its_message_is_announced_without_its_bytes) {
  lanes::LaneTable table(
      {.source = lanes::fake_source({.has_ring = true, .has_meeting = true})},
      0, std::make_shared<health::FaultBoard>(0),
      [](int, const lanes::Receipt&) {});
  for (const auto& [size, kind] :
       {std::pair{2, lanes::LaneKind::kIpc},
        std::pair{100'000, lanes::LaneKind::kIpc},
        std::pair{2, lanes::LaneKind::kNccl},
        std::pair{100'000, lanes::LaneKind::kNccl}}) {
    Message message = with_tensor(at::ones({3}));
    const lanes::Descriptor sent{.lane = kind,
                                 .slot = 2,
                                 .sequence = 9,
                                 .num_bytes = int64_t{3} * size * 8,
                                 .dtype = at::kDouble,
                                 .sizes = {3, size}};
    message.tensors.push_back(
        {.requires_grad = true,
         .lane = std::make_shared<const lanes::Descriptor>(sent)});
    message.tensors.push_back({.data = at::full({5}, 7.0)});
    const Encoded encoded = encode(message);
    EXPECT_TRUE(encoded.large.empty());
    const auto packet = bytes_of(encoded.packet);
    Header header = decode_packet(packet, kSource);
    ASSERT_TRUE(header.blob_is_inline);
    EXPECT_TRUE(decode_blob(header.inline_blob, header, &table).empty());
    const auto& tensors = header.message.tensors;
    ASSERT_EQ(tensors.size(), 3u);
    EXPECT_FALSE(tensors[1].data.defined());
    EXPECT_TRUE(tensors[1].requires_grad);
    ASSERT_TRUE(tensors[1].lane);
    EXPECT_EQ(tensors[1].lane->lane, kind);
    EXPECT_EQ(tensors[1].lane->slot, sent.slot);
    EXPECT_EQ(tensors[1].lane->sequence, sent.sequence);
    EXPECT_EQ(tensors[1].lane->num_bytes, sent.num_bytes);
    EXPECT_EQ(tensors[1].lane->dtype, sent.dtype);
    EXPECT_EQ(tensors[1].lane->sizes, sent.sizes);
    EXPECT_TRUE(at::equal(tensors[2].data, at::full({5}, 7.0)));
    Header without = decode_packet(packet, kSource);
    EXPECT_THROW(decode_blob(without.inline_blob, without), CorruptMessage);
  }
}

TEST(Wire, EverythingArrives) {
  const Message sent = rich_message();
  const Message got = round_trip(sent);
  EXPECT_EQ(got.channel, sent.channel);
  EXPECT_EQ(got.fields, sent.fields);
  EXPECT_EQ(got.bytes, sent.bytes);
  EXPECT_EQ(got.source_rank, kSource);
  ASSERT_EQ(got.tensors.size(), sent.tensors.size());
  for (size_t i = 0; i < sent.tensors.size(); ++i) {
    const MessageTensor& a = sent.tensors[i];
    const MessageTensor& b = got.tensors[i];
    EXPECT_EQ(a.requires_grad, b.requires_grad);
    EXPECT_EQ(a.ref.id, b.ref.id);
    EXPECT_EQ(a.ref.owner_rank, b.ref.owner_rank);
    ASSERT_EQ(a.data.defined(), b.data.defined());
    if (!a.data.defined()) continue;
    EXPECT_EQ(a.data.sizes(), b.data.sizes());
    EXPECT_TRUE(at::equal(a.data, b.data));
  }
}

TEST(Wire, SmallMessageIsOnePacket) {
  Message message = rich_message();
  message.tensors.push_back({at::rand({4096}), false, {}});
  const Encoded encoded = encode(message);
  EXPECT_FALSE(encoded.blob.defined());
  EXPECT_TRUE(encoded.large.empty());
  EXPECT_EQ(encoded.num_bytes(), kPacketBytes);
}

class WireDtype : public testing::TestWithParam<at::ScalarType> {};

TEST_P(WireDtype, SmallAndLargeTensorsKeepDtypeAndBits) {
  for (const int64_t size : {3, 100'000}) {
    const at::Tensor sent =
        at::rand({size}, at::kFloat).mul(100).to(GetParam());
    const at::Tensor got = round_trip(with_tensor(sent)).tensors[0].data;
    ASSERT_EQ(got.scalar_type(), GetParam());
    ASSERT_EQ(got.sizes(), sent.sizes());
    EXPECT_EQ(
        std::memcmp(got.const_data_ptr(), sent.const_data_ptr(), sent.nbytes()),
        0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllDtypes, WireDtype,
    testing::Values(at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
                    at::kHalf, at::kFloat, at::kDouble, at::kComplexFloat,
                    at::kComplexDouble, at::kBool, at::kBFloat16,
                    at::kFloat8_e4m3fn),
    [](const auto& info) { return c10::toString(info.param); });

TEST(Wire, StridedTensorsArriveContiguous) {
  const at::Tensor sent = at::arange(12).view({3, 4}).t().slice(0, 0, 4, 2);
  ASSERT_FALSE(sent.is_contiguous());
  const at::Tensor got = round_trip(with_tensor(sent)).tensors[0].data;
  EXPECT_TRUE(got.is_contiguous());
  EXPECT_TRUE(at::equal(sent, got));
}

TEST(Wire, ExpandedAndConjugatedTensorsArriveAsValues) {
  const at::Tensor expanded = at::full({1}, 2.5).expand({4});
  EXPECT_TRUE(
      at::equal(expanded, round_trip(with_tensor(expanded)).tensors[0].data));
  const at::Tensor conjugated = at::rand({4}, at::kComplexFloat).conj();
  ASSERT_TRUE(conjugated.is_conj());
  EXPECT_TRUE(at::equal(conjugated.resolve_conj(),
                        round_trip(with_tensor(conjugated)).tensors[0].data));
}

TEST(Wire, LargeTensorIsCopiedUnlessItIsStable) {
  Message message = with_tensor(at::rand({kSmallTensorBytes}));
  const at::Tensor sent = message.tensors[0].data;
  Encoded encoded = encode(message);
  ASSERT_EQ(encoded.large.size(), 1u);
  EXPECT_NE(encoded.large[0].const_data_ptr(), sent.const_data_ptr());
  message.tensors[0].is_stable = true;
  encoded = encode(message);
  EXPECT_EQ(encoded.large[0].const_data_ptr(), sent.const_data_ptr());
  EXPECT_FALSE(encoded.blob.defined());
}

TEST(Wire, LargeStridedTensorIsCopiedOnce) {
  const Parts parts =
      take_apart(with_tensor(at::rand({kSmallTensorBytes, 2}).slice(1, 0, 1)));
  ASSERT_EQ(parts.large.size(), 1u);
  EXPECT_FALSE(parts.large[0].is_callers);
}

TEST(Wire, LongStructureAndManyTensorsTravelAsBlob) {
  Message message = rich_message();
  message.bytes.assign(200'000, 'x');
  for (int i = 0; i < 300; ++i) {
    message.tensors.push_back({at::full({2}, i), false, {}});
  }
  EXPECT_TRUE(encode(message).blob.defined());
  const Message got = round_trip(message);
  EXPECT_EQ(got.bytes, message.bytes);
  ASSERT_EQ(got.tensors.size(), message.tensors.size());
  EXPECT_TRUE(at::equal(got.tensors.back().data, at::full({2}, 299)));
}

TEST(Wire, RejectsTensorsWithoutDenseData) {
  EXPECT_THROW(encode(with_tensor(at::ones({2, 2}).to_sparse())), ValueError);
  EXPECT_THROW(encode(with_tensor(
                   at::empty({2}, at::TensorOptions(at::Device(at::kMeta))))),
               ValueError);
}

TEST(Wire, SequenceIsCarried) {
  const Encoded encoded = encode(rich_message());
  set_sequence(encoded.packet.mutable_data_ptr<uint8_t>(), 77);
  EXPECT_EQ(decode_packet(bytes_of(encoded.packet), kSource).sequence, 77u);
}

TEST(Wire, EveryTruncationIsAnErrorThatNamesTheSource) {
  Message message = rich_message();
  message.bytes.assign(kPacketBytes, 'y');
  const Encoded encoded = encode(message);
  const std::vector<uint8_t> packet = bytes_of(encoded.packet);
  const std::vector<uint8_t> blob = bytes_of(encoded.blob);
  // All cuts in the part behind the structure, some in the structure.
  for (size_t size = 0; size < blob.size();
       size += size < kPacketBytes ? 512 : 1) {
    const std::vector<uint8_t> part(blob.begin(), blob.begin() + size);
    EXPECT_THROW(decode(packet, part, {}), CorruptMessage) << size;
    Header header = decode_packet(packet, kSource);
    header.blob_bytes = static_cast<int64_t>(size);  // a header that agrees
    EXPECT_THROW(decode_blob(part, header), CorruptMessage) << size;
  }
  const std::vector<uint8_t> part(packet.begin(), packet.begin() + 40);
  try {
    decode(part, blob, {});
    FAIL() << "no error";
  } catch (const CorruptMessage& error) {
    EXPECT_NE(std::string(error.what()).find("global_rank 5"),
              std::string::npos);
  }
}

// Whatever the bytes are, decoding ends with a message or a CorruptMessage;
// the sanitizers watch for reads outside of them.
TEST(Wire, MutatedBytesNeverDoHarm) {
  Message message = rich_message();
  message.tensors.push_back({at::rand({20'000}), false, {}});
  const Encoded small = encode(message);
  message.bytes.assign(kPacketBytes, 'z');
  const Encoded long_one = encode(message);
  std::mt19937 random(20260101);
  int num_rejected = 0;
  for (int round = 0; round < 20'000; ++round) {
    const bool use_small = round % 2 == 0;
    std::vector<uint8_t> packet =
        bytes_of(use_small ? small.packet : long_one.packet);
    std::vector<uint8_t> blob =
        use_small ? std::vector<uint8_t>() : bytes_of(long_one.blob);
    const int num_changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < num_changes; ++i) {
      auto& target = !blob.empty() && random() % 2 == 0 ? blob : packet;
      // Mostly the part that has a meaning.
      const size_t limit = random() % 4 == 0
                               ? target.size()
                               : std::min<size_t>(400, target.size());
      const size_t index = random() % limit;
      if (random() % 2 == 0) {
        target[index] = static_cast<uint8_t>(random());
      } else {
        target[index] ^= static_cast<uint8_t>(1u << (random() % 8));
      }
    }
    try {
      Header header = decode_packet(packet, kSource);
      if (header.blob_is_inline) {
        decode_blob(header.inline_blob, header);
      } else if (!blob.empty()) {
        decode_blob(blob, header);
      }
    } catch (const CorruptMessage&) {
      ++num_rejected;
    }
  }
  EXPECT_GT(num_rejected, 1000);
}

TEST(Wire, RandomBytesAreRejected) {
  std::mt19937 random(7);
  for (int round = 0; round < 1000; ++round) {
    std::vector<uint8_t> packet(kPacketBytes);
    for (uint8_t& byte : packet) byte = static_cast<uint8_t>(random());
    EXPECT_THROW(decode_packet(packet, kSource), CorruptMessage);
  }
}

}  // namespace
}  // namespace smp::mailbox::wire
