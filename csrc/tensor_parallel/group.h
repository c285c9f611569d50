#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/comm/group_wait.h"
#include "csrc/tensor_parallel/alone.h"
#include "csrc/tensor_parallel/header.h"

namespace smp::tensor_parallel {

/// Extents of the parts of the ranks along a dim; empty: all alike.
using Sizes = std::vector<int64_t>;

/// Counts of a group since it was made.
struct Traffic {
  int64_t num_calls = 0;
  /// Bytes that this rank must send at the least, by any transport: for n bytes
  /// of a whole tensor n (t - 1) / t, twice that for an all-reduce.
  int64_t bytes_sent = 0;
};

class Group;

/// The result of a collective, which may be on its way.
class Pending {
 public:
  using Finish = std::function<at::Tensor()>;

  explicit Pending(at::Tensor ready);
  Pending(const Group& group, const Header& header, comm::WorkPtr work,
          Finish finish);

  /// Waits for the result, or makes the current stream of the device wait;
  /// once.
  /// @throws ValueError on every rank when shapes disagree; Error and
  ///     PeerFailure as `comm::wait_for`
  at::Tensor take();

 private:
  const Group* group_ = nullptr;  // null: the result is in `ready_`
  Header header_{};
  comm::WorkPtr work_;
  Finish finish_;
  at::Tensor ready_;
};

/// The ranks that split layers, as the regions see them: collectives along any
/// dim, with parts of any size. All ranks issue them in one order; when they
/// disagree on a shape, each raises an error that names both shapes.
///
/// Nothing is communicated when the group is one rank, for tensors without data
/// (meta, fake), and while `alone` is set: results then have the right shapes,
/// and values as if all ranks held the same.
class Group {
 public:
  /// @param communicator  null in a group of one
  /// @param control  for host tensors; null: the communicator serves these.
  ///     There the ranks compare calls that they are about to issue on a
  ///     device: a device call that has begun with different arguments can only
  ///     be aborted
  Group(comm::CommunicatorPtr communicator, comm::CommunicatorPtr control,
        int group_rank, int size, comm::WaitOptions wait);

  int group_rank() const { return group_rank_; }
  int size() const { return size_; }
  Traffic traffic() const { return {num_calls_, bytes_sent_}; }

  /// Returns the parts of all ranks; `sizes` or, without them, an even split of
  /// `extent`.
  /// @throws ValueError when there is no even split
  Sizes even_or(const Sizes& sizes, int64_t extent, const char* what) const;

  /// Begins the sum (maximum, minimum) of all ranks.
  /// @param may_overwrite  false: the result is a new tensor
  Pending begin_all_reduce(const at::Tensor& x, comm::ReduceOp op,
                           const char* what, bool may_overwrite = false);
  /// Begins to concatenate the parts of all ranks along `dim`.
  Pending begin_all_gather(const at::Tensor& x, int64_t dim, const Sizes& sizes,
                           const char* what);
  /// Begins to sum over all ranks; the result is the part of this rank, along
  /// `dim`.
  Pending begin_reduce_scatter(const at::Tensor& x, int64_t dim,
                               const Sizes& sizes, const char* what);
  /// Begins to gather parts, all of one shape, one after the other into
  /// `blocks` [t, ...]. Both are contiguous.
  Pending begin_gather_into(const at::Tensor& blocks, const at::Tensor& part,
                            const char* what);
  /// Begins to sum `blocks` [t, ...] over all ranks; block i goes into the
  /// `part` of group rank i. Both are contiguous.
  Pending begin_scatter_into(const at::Tensor& part, const at::Tensor& blocks,
                             const char* what);
  /// Sends part i along `split_dim` to group rank i, and concatenates the parts
  /// received along `concat_dim`.
  Pending begin_exchange(const at::Tensor& x, int64_t split_dim,
                         int64_t concat_dim, const Sizes& split_sizes,
                         const Sizes& concat_sizes, const char* what);

  /// Sends rows of dim 0, the first `sent[0]` to group rank 0 and so on. Puts
  /// the rows received, `received[i]` from group rank i, one after the other.
  Pending begin_row_exchange(const at::Tensor& x, const Sizes& sent,
                             const Sizes& received, const char* what);
  /// Sends numbers to each rank, as many to each, by group rank; returns the
  /// numbers that the others have for this rank. Only hosts exchange messages.
  /// @param header  header that all ranks must have
  Sizes exchange_counts(const Sizes& sent, const Header& header);

  /// Returns the part of this rank, a view. Communicates nothing.
  at::Tensor own_part(const at::Tensor& x, int64_t dim, const Sizes& sizes,
                      const char* what) const;

  /// Returns the value of group rank 0.
  int64_t broadcast_from_first(int64_t value, const char* what);
  /// Returns whether `says` is true on every rank. Only hosts exchange
  /// messages.
  bool all_say(bool says, const char* what);

  /// Returns in how many pieces a part [...] is gathered beside products, see
  /// `num_pieces` in pieces.h.
  int64_t num_pieces(const at::Tensor& part, int64_t extent) const;

  /// Returns whether nothing is communicated for a tensor.
  bool is_alone(const at::Tensor& tensor) const;

 private:
  friend class Pending;

  /// Issues a collective whose arguments are compared before or with it.
  template <typename Start>
  comm::WorkPtr issue(comm::Communicator& on, const Header& header,
                      int64_t num_bytes, Start&& start);
  void finish(comm::Work& work, const comm::Communicator& on,
              const Header& header) const;
  void compare(const Header& header) const;
  /// Compares also the numbers that each rank sends to each rank, in elements.
  void compare(const Header& header, const Sizes& sent,
               const Sizes& received) const;
  [[noreturn]] void raise_disagreement(const Header& header) const;
  std::vector<at::Tensor> gather_headers(const at::Tensor& own,
                                         const char* what) const;
  comm::Communicator& control() const;

  const comm::CommunicatorPtr communicator_;
  const comm::CommunicatorPtr control_;
  const int group_rank_;
  const int size_;
  const comm::WaitOptions wait_;
  std::atomic<int64_t> num_calls_ = 0;
  std::atomic<int64_t> bytes_sent_ = 0;
};

}  // namespace smp::tensor_parallel
