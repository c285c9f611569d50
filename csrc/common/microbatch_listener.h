#pragma once

namespace smp {

/// Hears that a microbatch has ended: all of its backward work on this rank is
/// done. What runs steps and what reduces gradients know this of each other.
class MicrobatchListener {
 public:
  virtual ~MicrobatchListener() = default;
  /// From any thread; a microbatch ends once in a step.
  virtual void on_microbatch_end(int mb) = 0;
};

}  // namespace smp
