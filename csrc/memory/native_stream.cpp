#include "csrc/memory/kernel_stream.h"

namespace smp::memory {

const bool kHasNativeHandles = true;

NativeStream native_stream(const c10::Stream& current) {
  return {current, current.native_handle()};
}

}  // namespace smp::memory
