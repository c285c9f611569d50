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

/// Properties of a tensor that are known without its data.
struct TensorMeta {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;

  static TensorMeta of(const at::Tensor& tensor);
  int64_t num_bytes() const;
  void append_to(std::string& bytes) const;
};

/// Refs that this rank does not hold any more, with the ranks that have their
/// data. Thread-safe; handles may end in any thread.
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

/// Ranks to which the results of one call of a module were sent the last time.
/// Its owner can send the next results there unasked. Thread-safe.
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

/// Returns hops and a structure as one byte string, which travels once
/// (StructureCache).
std::string with_hops(const Route::Hops& hops, const std::string& structure);
/// Takes the hops off such a byte string and returns them.
/// @throws Error when the bytes do not begin with hops
Route::Hops take_hops(std::string& bytes);

/// A tensor of a step, wherever its data are, as the rank that named it sees
/// it. Its members belong to the thread that holds the rank's baton.
struct RemoteRef {
  ~RemoteRef();

  mailbox::Ref ref;
  int home_rank = -1;  ///< global rank that has the data first
  /// True for an ordinary tensor of this rank that got a name as an argument.
  bool is_argument = false;
  bool is_gradient = false;  ///< came out of a backward
  int64_t mb = 0;
  TensorMeta meta;
  /// Other ranks which have the data or will get them.
  std::vector<int> copies;
  std::vector<int> foreseen;  ///< those of `copies` not asked for yet
  /// True if the handle has the data already; it may have changed them.
  bool is_local = false;
  int num_published = 0;  ///< owners that only keep it for other ranks
  /// Data of a tensor that is to outlive its microbatch.
  at::Tensor kept;
  std::shared_ptr<Route> route;  ///< null: not learned
  int result_idx = 0;
  /// Null for refs named by another rank: that rank releases them.
  std::shared_ptr<ReleaseList> releases;
};

using RemoteRefPtr = std::shared_ptr<RemoteRef>;

/// Returns the ref of a handle, or null for an ordinary tensor.
RemoteRefPtr remote_ref_of(const at::Tensor& tensor);
/// Attaches the ref to `handle`, for as long as the handle lives.
void attach_remote_ref(const at::Tensor& handle, RemoteRefPtr ref);

}  // namespace smp::pipeline
