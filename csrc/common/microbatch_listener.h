#pragma once

namespace smp {

/// Receives the end of a microbatch: all of its backward work on this rank is
/// done. Code that runs steps and code that reduces gradients share only this
/// interface.
class MicrobatchListener {
 public:
  virtual ~MicrobatchListener() = default;
  /// Called from any thread; a microbatch ends once in a step.
  virtual void on_microbatch_end(int mb) = 0;
};

}  // namespace smp
