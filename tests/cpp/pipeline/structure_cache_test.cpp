#include "csrc/pipeline/structure_cache.h"

#include <gtest/gtest.h>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

TEST(StructureCache, bytes_travel_once_per_peer) {
  StructureCache sender;
  StructureCache receiver;
  const std::string bytes = "structure";
  const auto [id, with_bytes] = sender.on_send(1, bytes);
  EXPECT_GT(id, 0);
  EXPECT_TRUE(with_bytes);
  EXPECT_EQ(receiver.on_receive(0, id, bytes), bytes);
  const auto [again, with_bytes_again] = sender.on_send(1, bytes);
  EXPECT_EQ(again, id);
  EXPECT_FALSE(with_bytes_again);
  EXPECT_EQ(receiver.on_receive(0, id, ""), bytes);
  EXPECT_TRUE(sender.on_send(2, bytes).second) << "another peer";
}

TEST(StructureCache, large_and_empty_structures_are_sent_whole) {
  StructureCache cache;
  const std::string large(StructureCache::kMaxBytes + 1, 'x');
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(cache.on_send(1, large), std::make_pair(int64_t{0}, true));
    EXPECT_EQ(cache.on_send(1, ""), std::make_pair(int64_t{0}, true));
  }
  EXPECT_EQ(cache.on_receive(1, 0, large), large);
}

TEST(StructureCache, changing_structures_do_not_fill_the_memory) {
  StructureCache cache;
  for (size_t i = 0; i < StructureCache::kMaxPerPeer; ++i) {
    EXPECT_GT(cache.on_send(1, std::to_string(i)).first, 0);
  }
  EXPECT_EQ(cache.on_send(1, "one more").first, 0);
  EXPECT_FALSE(cache.on_send(1, "7").second) << "the known ones stay known";
}

TEST(StructureCache, all_that_is_kept_for_a_peer_has_a_limit) {
  StructureCache cache;
  std::string bytes(StructureCache::kMaxBytes, 'x');
  size_t num_kept = 0;
  for (int i = 0; i < 200; ++i) {
    bytes[0] = static_cast<char>(i);
    if (cache.on_send(1, bytes).first != 0) ++num_kept;
  }
  EXPECT_EQ(num_kept * StructureCache::kMaxBytes,
            StructureCache::kMaxBytesPerPeer);
  EXPECT_GT(cache.on_send(2, bytes).first, 0) << "another peer has its own";
}

TEST(StructureCache, ids_of_two_peers_are_two_structures) {
  StructureCache cache;
  EXPECT_EQ(cache.on_receive(1, 5, "one"), "one");
  EXPECT_EQ(cache.on_receive(2, 5, "two"), "two");
  EXPECT_EQ(cache.on_receive(1, 5, ""), "one");
  EXPECT_EQ(cache.on_receive(2, 5, ""), "two");
}

TEST(StructureCache, an_unknown_id_names_the_peer) {
  StructureCache cache;
  try {
    cache.on_receive(3, 9, "");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("global_rank 3"), std::string::npos);
  }
}

}  // namespace
}  // namespace smp::pipeline
