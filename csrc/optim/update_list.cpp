#include "csrc/optim/update_list.h"

#include <c10/util/Exception.h>

#include "csrc/common/check.h"
#include "csrc/optim/tensor_list.h"

namespace smp::optim {

namespace {

// Copies of this many elements would push other data out of the caches.
constexpr int64_t kBypassElements = int64_t{1} << 21;

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ||
         tensor.scalar_type() == at::kBFloat16;
}

bool have_equal_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && (a.strides() == b.strides() ||
                                    (a.is_contiguous() && b.is_contiguous()));
}

void check_length(const char* op, const char* name, at::TensorList list,
                  at::TensorList params) {
  TORCH_CHECK_VALUE(list.size() == params.size(), rank_prefix(), op, ": ", name,
                    " must have one tensor per parameter, ", params.size(),
                    " of them, got ", list.size());
}

// Checks one parameter and the tensors that belong to it.
class Checker {
 public:
  Checker(const char* op, size_t idx, const at::Tensor& param,
          const UpdateKinds& kinds)
      : op_(op), idx_(idx), param_(param), kinds_(kinds) {}

  void check_param(c10::Device device) const {
    kinds_.moments.has_value() ? check_compact() : check_wide();
    TORCH_CHECK_VALUE(param_.layout() == at::kStrided &&
                          param_.is_non_overlapping_and_dense(),
                      rank_prefix(), op_, ": parameter ", idx_, " with sizes ",
                      param_.sizes(),
                      " must fill one piece of memory; make it contiguous");
    check_device("parameter", param_, device);
  }

  void check_grad(const at::Tensor& grad) const {
    check_device("gradient", grad, param_.device());
    const bool has_dtype = grad.scalar_type() == param_.scalar_type() ||
                           (is_half(param_) ? grad.scalar_type() == at::kFloat
                                            : is_half(grad) && !is_double());
    TORCH_CHECK_VALUE(has_dtype, rank_prefix(), op_, ": gradient ", idx_,
                      " must have the parameter's dtype ", param_.scalar_type(),
                      is_double()       ? ""
                      : is_half(param_) ? " or float32"
                                        : " or a 16-bit one",
                      ", got ", grad.scalar_type());
    check_layout("gradient", grad);
  }

  void check_state(const char* name, const at::Tensor& tensor) const {
    check_device(name, tensor, param_.device());
    check_dtype(name, tensor, kinds_.moments.value_or(param_.scalar_type()));
    check_layout(name, tensor);
  }

  void check_number(const char* name, const at::Tensor& tensor,
                    c10::ScalarType dtype) const {
    check_device(name, tensor, param_.device());
    check_dtype(name, tensor, dtype);
    TORCH_CHECK_VALUE(tensor.numel() == 1, rank_prefix(), op_, ": ", name, " ",
                      idx_, " must be one number, got sizes ", tensor.sizes());
  }

  void check_copy(const at::Tensor& copy) const {
    check_device("copy", copy, param_.device());
    TORCH_CHECK_VALUE(is_half(copy) && param_.scalar_type() == at::kFloat,
                      rank_prefix(), op_, ": copy ", idx_,
                      " must be a float16 or bfloat16 copy of a float32 "
                      "parameter, got one of dtype ",
                      copy.scalar_type(), " of a parameter of dtype ",
                      param_.scalar_type());
    const bool fits = copy.sizes() == param_.sizes()
                          ? have_equal_layout(copy, param_)
                          : copy.numel() == param_.numel() &&
                                copy.is_contiguous() && param_.is_contiguous();
    TORCH_CHECK_VALUE(fits, rank_prefix(), op_, ": copy ", idx_, " with sizes ",
                      copy.sizes(), " and strides ", copy.strides(),
                      " does not hold the elements of its parameter, sizes ",
                      param_.sizes(), " and strides ", param_.strides(),
                      ", in the same order");
  }

 private:
  void check_wide() const {
    TORCH_CHECK_VALUE(
        param_.scalar_type() == at::kFloat || is_double(), rank_prefix(), op_,
        ": parameter ", idx_, " must be float32 or float64, got ",
        param_.scalar_type(),
        "; 16-bit parameters are updated through float32 masters: set fp16 or "
        "bf16 in the configuration and wrap the optimizer in "
        "smp.DistributedOptimizer, or let smp.optimizers.FusedAdam update "
        "bfloat16 parameters themselves, by masters=\"residue\" or \"none\"");
  }

  void check_compact() const {
    TORCH_CHECK_VALUE(param_.scalar_type() == at::kFloat ||
                          param_.scalar_type() == at::kBFloat16,
                      rank_prefix(), op_, ": parameter ", idx_,
                      " must be float32 or bfloat16, got ",
                      param_.scalar_type(),
                      "; for other dtypes use state_dtype=\"fp32\"");
  }

  bool is_double() const { return param_.scalar_type() == at::kDouble; }

  void check_device(const char* name, const at::Tensor& tensor,
                    c10::Device device) const {
    TORCH_CHECK_VALUE(tensor.device() == device, rank_prefix(), op_, ": ", name,
                      " ", idx_, " is on ", tensor.device(), ", not on ",
                      device,
                      " like the first parameter; call "
                      "once per device");
  }

  void check_dtype(const char* name, const at::Tensor& tensor,
                   c10::ScalarType dtype) const {
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, rank_prefix(), op_, ": ",
                      name, " ", idx_, " must be ", dtype, ", got ",
                      tensor.scalar_type());
  }

  void check_layout(const char* name, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(
        tensor.layout() == at::kStrided && have_equal_layout(tensor, param_),
        rank_prefix(), op_, ": ", name, " ", idx_, " must have sizes ",
        param_.sizes(), " and strides ", param_.strides(),
        " like its parameter, got a ", tensor.layout(), " tensor with sizes ",
        tensor.sizes());
  }

  const char* op_;
  size_t idx_;
  const at::Tensor& param_;
  const UpdateKinds& kinds_;
};

// Returns a number as a double on a device; undefined stays undefined.
at::Tensor number_on(c10::Device device, const char* op, const char* name,
                     const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  TORCH_CHECK_VALUE(tensor.numel() == 1 && tensor.is_floating_point(),
                    rank_prefix(), op, ": ", name,
                    " must be one floating point number, got sizes ",
                    tensor.sizes(), " of ", tensor.scalar_type());
  return tensor.to(at::TensorOptions().dtype(at::kDouble).device(device),
                   /*non_blocking=*/true);
}

const double* number_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
}

}  // namespace

std::vector<kernels::UpdateArrays> update_arrays(const char* op,
                                                 const UpdateTensors& tensors,
                                                 const UpdateKinds& kinds) {
  const at::TensorList params = tensors.params;
  const bool has_grads = !tensors.grads.empty();
  const bool has_copies = !tensors.copies.empty();
  if (has_grads) check_length(op, "grads", tensors.grads, params);
  check_length(op, "exp_avgs", tensors.exp_avgs, params);
  check_length(op, "exp_avg_sqs", tensors.exp_avg_sqs, params);
  check_length(op, "steps", tensors.steps, params);
  if (has_copies) check_length(op, "copies", tensors.copies, params);

  std::vector<kernels::UpdateArrays> result(params.size());
  int64_t num_elements = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const Checker checker(op, i, param, kinds);
    checker.check_param(params[0].device());
    if (has_grads) checker.check_grad(tensors.grads[i]);
    checker.check_state("exp_avg", tensors.exp_avgs[i]);
    if (kinds.has_norms) {
      checker.check_number("exp_avg_sq", tensors.exp_avg_sqs[i],
                           param.scalar_type());
    } else {
      checker.check_state("exp_avg_sq", tensors.exp_avg_sqs[i]);
    }
    checker.check_number("step", tensors.steps[i], at::kFloat);
    if (has_copies) checker.check_copy(tensors.copies[i]);
    num_elements += param.numel();
    if (param.is_meta()) continue;
    kernels::UpdateArrays& arrays = result[i];
    arrays.param = param.mutable_data_ptr();
    arrays.exp_avg = tensors.exp_avgs[i].mutable_data_ptr();
    arrays.exp_avg_sq = tensors.exp_avg_sqs[i].mutable_data_ptr();
    arrays.step = tensors.steps[i].mutable_data_ptr<float>();
    arrays.num_elements = param.numel();
    arrays.dtype = arrays.grad_dtype = kernel_dtype(param.scalar_type());
    if (has_grads) {
      arrays.grad = tensors.grads[i].const_data_ptr();
      arrays.grad_dtype = kernel_dtype(tensors.grads[i].scalar_type());
    }
    if (has_copies) {
      arrays.copy = tensors.copies[i].mutable_data_ptr();
      arrays.copy_dtype = kernel_dtype(tensors.copies[i].scalar_type());
    }
  }
  for (auto& arrays : result) {
    arrays.bypasses_cache = num_elements >= kBypassElements;
  }
  return result;
}

Scalars::Scalars(const char* op, c10::Device device, const at::Tensor& lr,
                 const OptionalTensor& grad_scale,
                 const OptionalTensor& found_inf)
    : lr_(number_on(device, op, "lr", lr)),
      divisor_(number_on(device, op, "grad_scale",
                         grad_scale.value_or(at::Tensor()))),
      found_inf_(number_on(device, op, "found_inf",
                           found_inf.value_or(at::Tensor()))) {}

kernels::UpdateScalars Scalars::view() const {
  return {number_of(lr_), number_of(divisor_), number_of(found_inf_)};
}

double Scalars::lr() const { return *number_of(lr_); }

double Scalars::divisor() const {
  return divisor_.defined() ? *number_of(divisor_) : 1;
}

bool Scalars::is_skipped() const {
  return found_inf_.defined() && *number_of(found_inf_) != 0;
}

void count_steps(const std::vector<kernels::UpdateArrays>& arrays) {
  for (const auto& a : arrays) *a.step += 1;
}

std::vector<kernels::AdamFactors> adam_factors_of(
    const std::vector<kernels::UpdateArrays>& arrays,
    const kernels::AdamOptions& options, double divisor) {
  std::vector<kernels::AdamFactors> factors;
  factors.reserve(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    // Steps are equal nearly always, and powers take their time.
    if (i > 0 && *arrays[i].step == *arrays[i - 1].step) {
      factors.push_back(factors.back());
    } else {
      factors.push_back(
          kernels::adam_factors(options, *arrays[i].step, divisor));
    }
  }
  return factors;
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace smp::optim
