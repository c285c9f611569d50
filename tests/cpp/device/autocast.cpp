// Mixed precision by torch's own lists of operators.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SMP_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SMP_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SMP_FP32_UNLESS_GIVEN(...) \
  KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SMP_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SMP_LOWER)
  AT_FORALL_FP32(SMP_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SMP_FP32_UNLESS_GIVEN)
  AT_FORALL_PROMOTE(SMP_PROMOTE)
}

}  // namespace
}  // namespace at::autocast
