#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/pipeline/messenger.h"
#include "csrc/pipeline/scheduler.h"
#include "csrc/pipeline/tensor_directory.h"

namespace smp::pipeline {

/// What the driver's model returned, as the other ranks get it.
struct ModelOutput {
  struct Tensor {
    at::Tensor data;   ///< undefined when `ref` is set
    RemoteRefPtr ref;  ///< large ones come only when they are used
    bool requires_grad = false;
  };
  std::string structure;
  std::vector<Tensor> tensors;
};

/// What the driver's step bodies tell those of the other ranks, which follow
/// them: results of the root module, and when a backward is over. In contexts
/// of step bodies, but for `take`, `end_microbatch` and `clear`.
class Announcements {
 public:
  Announcements(Messenger& messenger, Scheduler& scheduler,
                TensorDirectory& tensors);

  /// Driver: hands the root module's result to the other ranks.
  void publish_output(const std::string& structure,
                      const std::vector<at::Tensor>& tensors);
  /// Others: waits for it.
  ModelOutput await_output();
  /// Driver: tells the others that one model.backward is over.
  void end_backward();
  /// Others: waits until the driver's model.backward is over.
  void await_backward();

  /// A message of kind kModelOutput or kBackwardDone.
  void take(const Header& header, mailbox::Message&& message);
  /// Nobody asks for what was published any more.
  void end_microbatch(int mb);
  void clear();

 private:
  using Key = std::tuple<Kind, int64_t, int64_t>;  // kind, mb, index

  mailbox::Message await(Kind kind, int64_t index, const char* waits_for);

  Messenger& messenger_;
  Scheduler& scheduler_;
  TensorDirectory& tensors_;
  std::mutex mutex_;  // guards what follows; before that of the scheduler
  std::map<Key, Slot> notices_;
  // Driver: stays until all bodies of the microbatch are over.
  std::map<int, std::vector<RemoteRefPtr>> published_;
};

}  // namespace smp::pipeline
