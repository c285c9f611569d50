#pragma once

#include <memory>

#include "csrc/common/check.h"
#include "csrc/memory/mark.h"

namespace smp::lanes {

/// Returns the end of a copy that will not be made any more.
inline memory::Mark never() {
  class NeverEvent final : public memory::Mark::Event {
   public:
    void block(const c10::Stream& /*stream*/) const override {
      SMP_CHECK(false,
                "a tensor from another rank will not come any more: its lane "
                "is closed");
    }
    bool is_over() const override { return false; }
  };
  return memory::Mark(std::make_shared<NeverEvent>());
}

}  // namespace smp::lanes
