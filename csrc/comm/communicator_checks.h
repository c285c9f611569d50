#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "csrc/comm/communicator.h"

namespace smp::comm {

/// Words for the group of a communicator.
struct GroupInfo {
  std::string name;
  int group_rank;
  int size;
};

/// One call of a communicator, kept to be named in an error: building the text
/// for every message would cost more than sending it.
struct CallName {
  std::shared_ptr<const GroupInfo> group;
  const char* operation;            ///< literal, for instance "recv"
  const char* peer_word = nullptr;  ///< literal: "src", "dst", "root"
  int peer = -1;
  int tag = -1;

  /// For instance "recv(src=1, tag=7) on gloo:world (group rank 0 of 2)".
  std::string text() const;
};

/// What every backend asks of its arguments; each throws an Error that begins
/// with the text of `call`.

/// Defined, dense and contiguous.
void check_tensor(const at::Tensor& tensor, const CallName& call);

/// `check_tensor`, and in host memory.
void check_cpu_tensor(const at::Tensor& tensor, const CallName& call);

/// `check_tensor`, and of a type that can be summed and compared.
void check_reducible(const at::Tensor& tensor, const CallName& call);

/// The peer is a group rank other than one's own, the tag is not negative.
void check_peer(const CallName& call);

/// The peer is a group rank.
void check_root(const CallName& call);

/// The tag is not negative.
void check_tag(const CallName& call);

/// `whole` has `size` times the elements of `part`, and the same dtype and
/// device; both pass `check_tensor`.
void check_parts(const at::Tensor& whole, const at::Tensor& part,
                 const CallName& call);

/// Both have the same number of elements, a multiple of `size`, and the same
/// dtype and device; both pass `check_tensor`.
void check_exchange(const at::Tensor& output, const at::Tensor& input,
                    const CallName& call);

/// The counts are `size` numbers, none negative, whose sums are the elements of
/// the tensors; these have the same dtype and device and pass `check_tensor`.
void check_counts(const at::Tensor& output, const at::Tensor& input,
                  const Counts& output_counts, const Counts& input_counts,
                  const CallName& call);

/// For instance "group rank 1 sends 6 elements to group rank 0, which expects
/// 4"; empty if both sides of all pairs agree.
/// @param sent, received  of each rank
std::string count_disagreement(const std::vector<Counts>& sent,
                               const std::vector<Counts>& received);

/// For instance "Float[2, 3]".
std::string describe_tensor(const at::Tensor& tensor);

}  // namespace smp::comm
