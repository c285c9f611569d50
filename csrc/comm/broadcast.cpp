#include "csrc/comm/broadcast.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "csrc/common/check.h"

namespace smp::comm {

namespace {

class Piece {
 public:
  bool takes(const at::Tensor& tensor, int64_t max_bytes) const {
    return tensors_.empty() ||
           (tensor.scalar_type() == tensors_.front().scalar_type() &&
            tensor.device() == tensors_.front().device() &&
            num_bytes_ + static_cast<int64_t>(tensor.nbytes()) <= max_bytes);
  }

  void add(const at::Tensor& tensor) {
    tensors_.push_back(tensor);
    numel_ += tensor.numel();
    num_bytes_ += static_cast<int64_t>(tensor.nbytes());
  }

  void broadcast(Communicator& group, int root, const WaitOptions& wait) const {
    if (numel_ == 0) return;
    const at::Tensor flat =
        at::empty({numel_}, tensors_.front().options().requires_grad(false));
    const bool sends = group.group_rank() == root;
    if (sends) {
      for_each_part(flat, [](const at::Tensor& part, const at::Tensor& tensor) {
        part.copy_(tensor);
      });
    }
    // Bytes are sent because some transports do not support every dtype.
    follow(*group.broadcast(flat.view(at::kByte), root), wait, group,
           detail::concat("broadcast of ", tensors_.size(), " tensors"));
    if (sends) return;
    for_each_part(flat, [](const at::Tensor& part, const at::Tensor& tensor) {
      tensor.detach().copy_(part);
    });
  }

 private:
  template <typename Body>
  void for_each_part(const at::Tensor& flat, Body&& body) const {
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors_) {
      body(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()), tensor);
      offset += tensor.numel();
    }
  }

  std::vector<at::Tensor> tensors_;
  int64_t numel_ = 0;
  int64_t num_bytes_ = 0;
};

}  // namespace

void broadcast_coalesced(const std::vector<at::Tensor>& tensors,
                         Communicator& group, int root, const WaitOptions& wait,
                         int64_t piece_bytes) {
  if (group.size() == 1) return;
  const at::NoGradGuard no_grad;
  Piece piece;
  for (const at::Tensor& tensor : tensors) {
    if (!piece.takes(tensor, piece_bytes)) {
      piece.broadcast(group, root, wait);
      piece = {};
    }
    piece.add(tensor);
  }
  piece.broadcast(group, root, wait);
}

}  // namespace smp::comm
