#include "csrc/common/torch_releases.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace smp
