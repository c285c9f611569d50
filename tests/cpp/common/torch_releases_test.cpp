#include "csrc/common/torch_releases.h"

#include <gtest/gtest.h>

#include <memory>

namespace smp {
namespace {

struct NewBackend {
  void abort() { ++num_aborts; }
  int num_aborts = 0;
};
struct OldBackend {};

struct NewStream {
  void* native_handle() const { return handle; }
  void* handle;
};
struct OldStream {};

constexpr int kOtherwise = -1;
template <typename Stream>
int number_by_handle(const Stream& stream) {
  return by_handle(
      stream, [](void* handle) { return *static_cast<int*>(handle); },
      [] { return kOtherwise; });
}

TEST(TorchReleases, a_backend_is_aborted_where_its_class_can) {
  NewBackend backend;
  EXPECT_TRUE(abort_if_offered(backend));
  EXPECT_EQ(backend.num_aborts, 1);
}

TEST(TorchReleases, a_backend_that_cannot_abort_is_left_to_the_caller) {
  OldBackend backend;
  EXPECT_FALSE(abort_if_offered(backend));
}

TEST(TorchReleases, the_handle_of_a_stream_is_taken_where_it_tells_it) {
  int number = 3;
  EXPECT_TRUE(kTellsHandle<NewStream>);
  EXPECT_EQ(number_by_handle(NewStream{&number}), 3);
}

TEST(TorchReleases, a_stream_that_tells_no_handle_is_answered_otherwise) {
  EXPECT_FALSE(kTellsHandle<OldStream>);
  EXPECT_EQ(number_by_handle(OldStream{}), kOtherwise);
}

struct OldNode : std::enable_shared_from_this<OldNode> {};

struct NewNode {
  int num_owners = 0;
};
struct NewOwner {
  static NewOwner unsafe_steal_from_new(NewNode* made) {
    made->num_owners = 1;
    return {made};
  }
  static NewOwner reclaim_copy(NewNode* owned) {
    ++owned->num_owners;
    return {owned};
  }
  NewNode* object;
};

TEST(TorchReleases, nodes_have_shared_owners_where_those_of_torch_have_them) {
  const auto first = own_new<std::shared_ptr<OldNode>>(new OldNode());
  const auto second = owner_of<std::shared_ptr<OldNode>>(*first);
  EXPECT_EQ(first, second);
  EXPECT_EQ(first.use_count(), 2);
}

TEST(TorchReleases, nodes_have_intrusive_owners_where_those_of_torch_do) {
  NewNode node;
  EXPECT_EQ(own_new<NewOwner>(&node).object, &node);
  EXPECT_EQ(owner_of<NewOwner>(node).object, &node);
  EXPECT_EQ(node.num_owners, 2);
}

}  // namespace
}  // namespace smp
