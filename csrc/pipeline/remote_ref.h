#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/mailbox/message.h"

namespace smp::pipeline {

/// What is known of a tensor without having its data.
struct TensorMeta {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;

  static TensorMeta of(const at::Tensor& tensor);
  int64_t num_bytes() const;
  void append_to(std::string& bytes) const;
};

/// Refs that nobody of this rank holds any more, with the ranks that have
/// their data. Thread-safe; handles may end in any thread.
class ReleaseList {
 public:
  struct Released {
    mailbox::Ref ref;
    std::vector<int> holders;
  };
  void add(Released released);
  std::vector<Released> take();
  void clear();

 private:
  std::mutex mutex_;
  std::vector<Released> released_;
};

/// Where the results of one call of a module went the last time, so that its
/// owner can send them on without being told. Thread-safe.
class Route {
 public:
  using Hops = std::vector<std::pair<int, int>>;  // result index, global rank
  void add(int result_idx, int rank);
  void remove(int result_idx, int rank);
  Hops hops() const;

 private:
  mutable std::mutex mutex_;
  Hops hops_;
};

/// Hops and a structure as one byte string, which travels once
/// (StructureCache), and the hops taken off it again.
std::string with_hops(const Route::Hops& hops, const std::string& structure);
/// @throws Error when the bytes do not begin with hops
Route::Hops take_hops(std::string& bytes);

/// One tensor of a step as the rank that named it sees it, wherever the data
/// are. Its members belong to the thread that holds the rank's baton.
struct RemoteRef {
  ~RemoteRef();

  mailbox::Ref ref;
  int home_rank = -1;  ///< global rank that has the data first
  /// An ordinary tensor of this rank, which got a name as an argument.
  bool is_argument = false;
  bool is_gradient = false;  ///< came out of a backward
  int64_t mb = 0;
  TensorMeta meta;
  /// Other ranks which have the data or will get them.
  std::vector<int> copies;
  std::vector<int> foreseen;  ///< of `copies`, those not asked for yet
  /// The handle has the data already, and may have changed them.
  bool is_local = false;
  int num_published = 0;  ///< owners of this that only keep it for other ranks
  /// The data, when the tensor is to outlive its microbatch.
  at::Tensor kept;
  std::shared_ptr<Route> route;  ///< null: not learned
  int result_idx = 0;
  /// Null for refs named by another rank: that rank releases them.
  std::shared_ptr<ReleaseList> releases;
};

using RemoteRefPtr = std::shared_ptr<RemoteRef>;

/// The ref behind a handle; null for an ordinary tensor.
RemoteRefPtr remote_ref_of(const at::Tensor& tensor);
/// Makes `handle` stand for the ref, for as long as the handle lives.
void attach_remote_ref(const at::Tensor& handle, RemoteRefPtr ref);

}  // namespace smp::pipeline
