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

/// A result of the driver's model, as the other ranks receive it.
struct ModelOutput {
  struct Tensor {
    at::Tensor data;   ///< undefined when `ref` is set
    RemoteRefPtr ref;  ///< large tensors are sent only when used
    bool requires_grad = false;
  };
  std::string structure;
  std::vector<Tensor> tensors;
};

/// Sends notices from the driver's step bodies to those of the other ranks,
/// which follow them: results of the root module, and the ends of backwards.
/// All functions but `take`, `end_microbatch` and `clear` are called in
/// contexts of step bodies.
class Announcements {
 public:
  Announcements(Messenger& messenger, Scheduler& scheduler,
                TensorDirectory& tensors);

  /// Driver: sends the root module's result to the other ranks.
  void publish_output(const std::string& structure,
                      const std::vector<at::Tensor>& tensors);
  /// Other ranks: waits for the root module's result.
  ModelOutput await_output();
  /// Driver: announces to the other ranks that one model.backward is over.
  void end_backward();
  /// Other ranks: waits until the driver's model.backward is over.
  void await_backward();

  /// Takes a message of kind kModelOutput or kBackwardDone.
  void take(const Header& header, mailbox::Message&& message);
  /// Frees the outputs published for a microbatch, for which no rank asks now.
  void end_microbatch(int mb);
  void clear();

 private:
  using Key = std::tuple<Kind, int64_t, int64_t>;  // kind, mb, index

  mailbox::Message await(Kind kind, int64_t index, const char* waits_for);

  Messenger& messenger_;
  Scheduler& scheduler_;
  TensorDirectory& tensors_;
  std::mutex mutex_;  // guards what follows; locked before the scheduler's
  std::map<Key, Slot> notices_;
  // Driver: outputs, kept until all bodies of their microbatch are over.
  std::map<int, std::vector<RemoteRefPtr>> published_;
};

}  // namespace smp::pipeline
