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

/// A call of a communicator, from which an error's text is built. Building the
/// text for every message would cost more than sending it.
struct CallName {
  std::shared_ptr<const GroupInfo> group;
  const char* operation;            ///< literal, for instance "recv"
  const char* peer_word = nullptr;  ///< literal: "src", "dst", "root"
  int peer = -1;
  int tag = -1;

  /// Returns words such as "recv(src=1, tag=7) on gloo:world (group rank 0 of
  /// 2)".
  std::string text() const;
};

/// Checks of arguments that every backend makes. Each throws an Error that
/// begins with the text of `call`.

/// Checks that the tensor is defined, dense and contiguous.
void check_tensor(const at::Tensor& tensor, const CallName& call);

/// Runs `check_tensor` and checks that the tensor is in host memory.
void check_cpu_tensor(const at::Tensor& tensor, const CallName& call);

/// Runs `check_tensor` and checks that its type can be summed and compared.
void check_reducible(const at::Tensor& tensor, const CallName& call);

/// Checks that the peer is another group rank and the tag is not negative.
void check_peer(const CallName& call);

/// Checks that the peer is a group rank.
void check_root(const CallName& call);

/// Checks that `whole` has `size` times the elements of `part`, and the same
/// dtype and device. Both pass `check_tensor`.
void check_parts(const at::Tensor& whole, const at::Tensor& part,
                 const CallName& call);

/// Checks that both have the same number of elements, a multiple of `size`, and
/// the same dtype and device. Both pass `check_tensor`.
void check_exchange(const at::Tensor& output, const at::Tensor& input,
                    const CallName& call);

/// Checks that the counts are `size` numbers, none negative, whose sums are the
/// tensors' elements. The tensors have the same dtype and device and pass
/// `check_tensor`.
void check_counts(const at::Tensor& output, const at::Tensor& input,
                  const Counts& output_counts, const Counts& input_counts,
                  const CallName& call);

/// Returns words such as "group rank 1 sends 6 elements to group rank 0, which
/// expects 4"; empty if both sides of all pairs agree.
/// @param sent, received  counts of each rank
std::string count_disagreement(const std::vector<Counts>& sent,
                               const std::vector<Counts>& received);

/// Returns words such as "Float[2, 3]".
std::string describe_tensor(const at::Tensor& tensor);

}  // namespace smp::comm
