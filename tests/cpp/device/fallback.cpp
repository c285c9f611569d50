#include "tests/cpp/device/fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/cpp/device/generator.h"
#include "tests/cpp/device/operators.h"
#include "tests/cpp/device/streams.h"
#include "tests/cpp/device/twins.h"

namespace smp::late {
namespace {

using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, std::map<std::string, int64_t>> calls;  // guarded

// How an operator is run; found once from its schema.
struct Plan {
  std::string reason;  // why the stream is drained; empty: it is not
  bool needs_shapes = false;
  bool is_random = false;
  std::optional<size_t> generator;  // index of that argument
  // For each result the index of the argument that it is, or nothing.
  std::vector<std::optional<size_t>> returned_arguments;
  std::vector<size_t> outs;  // indices of `out=` arguments
};

bool is_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  const auto list = type->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::TensorType;
}

bool is_generator(c10::TypePtr type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

std::optional<size_t> argument_of(const c10::FunctionSchema& schema,
                                  const c10::Argument& result) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* info = schema.arguments()[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) {
      return i;
    }
  }
  return std::nullopt;
}

void add_results(const c10::FunctionSchema& schema, Plan& plan) {
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* info = result.alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(info == nullptr || info->isWrite(),
                                "late device: no kernel for the view ",
                                schema.name());
    plan.returned_arguments.push_back(info ? argument_of(schema, result)
                                           : std::nullopt);
    if (info == nullptr) plan.needs_shapes = true;
    if (!is_tensors(result.type())) plan.reason = "returns a number";
  }
}

Plan make_plan(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Plan plan;
  add_results(schema, plan);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (is_generator(argument.type())) plan.generator = i;
    const c10::AliasInfo* info = argument.alias_info();
    if (argument.kwarg_only() && info && info->isWrite()) {
      plan.outs.push_back(i);
      plan.needs_shapes = true;
    }
  }
  plan.is_random =
      op.hasTag(at::Tag::nondeterministic_seeded) || plan.generator.has_value();
  if (plan.is_random) {
    plan.reason = "random";
  } else if (op.hasTag(at::Tag::data_dependent_output) ||
             op.hasTag(at::Tag::dynamic_output_shape)) {
    plan.reason = "depends on data";
  } else if (plan.needs_shapes && plan.reason.empty() &&
             !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    plan.reason = "no meta kernel";
  }
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, std::unique_ptr<Plan>> plans;
  const std::lock_guard lock(mutex);
  auto& plan = plans[op.operator_name()];
  if (plan == nullptr) plan = std::make_unique<Plan>(make_plan(op));
  return *plan;
}

// Kernels of CUDA take indices from the host as well.
bool takes_host_tensors(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 ||
         name.rfind("aten::_index_put", 0) == 0 ||
         name.rfind("aten::_unsafe_index", 0) == 0;
}

// Returns the device of an operator's tensors, as CUDA's kernels check it.
c10::Device device_of_call(const c10::OperatorHandle& op,
                           const Stack& arguments) {
  const std::string& name = op.schema().name();
  std::optional<c10::Device> found;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const c10::Device device = tensor.device();
    if (device.type() == kType) {
      TORCH_CHECK(!found || *found == device,
                  "Expected all tensors to be on the same device, but found "
                  "at least two devices, ",
                  *found, " and ", device, "! (", name, ")");
      found = device;
    } else {
      TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors(name),
                  "Expected all tensors to be on the same device, but found "
                  "at least two devices, late and ",
                  device, "! (", name, ")");
    }
  };
  for (const c10::IValue& value : arguments) for_each_tensor(value, look);
  for (const c10::IValue& value : arguments) {
    if (!found && value.isDevice() && value.toDevice().type() == kType) {
      found = device(index_of(value.toDevice()));
    }
  }
  return found.value_or(device(current_device()));
}

Stack twins_of(Twins& twins, const Stack& values) {
  Stack result;
  for (const c10::IValue& value : values) result.push_back(twins.of(value));
  return result;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

at::Tensor like(const at::Tensor& meta, c10::Device where) {
  if (!meta.defined()) return {};
  return new_tensor(meta.sizes(), meta.strides(), meta.scalar_type(), where);
}

// Makes what a result will be: the argument, or new tensors.
c10::IValue result_like(const c10::IValue& meta, c10::Device where) {
  if (meta.isTensor()) return like(meta.toTensor(), where);
  if (!meta.isTensorList()) return meta;
  c10::List<at::Tensor> tensors;
  for (const at::Tensor& one : meta.toTensorVector()) {
    tensors.push_back(like(one, where));
  }
  return tensors;
}

void store(const std::string& name, const at::Tensor& from,
           const at::Tensor& to) {
  if (!to.defined() || !from.defined()) return;
  TORCH_CHECK(from.sizes() == to.sizes() && from.dtype() == to.dtype(),
              "late device: the meta kernel of ", name, " says ", to.dtype(),
              to.sizes(), ", the CPU's gives ", from.dtype(), from.sizes());
  to.copy_(from);
}

void store(const std::string& name, const c10::IValue& from,
           const c10::IValue& to) {
  if (from.isTensor() && to.isTensor()) {
    store(name, from.toTensor(), to.toTensor());
  } else if (from.isTensorList()) {
    const auto sources = from.toTensorVector();
    const auto targets = to.toTensorVector();
    for (size_t i = 0; i < sources.size(); ++i) {
      store(name, sources.at(i), targets.at(i));
    }
  }
}

Stack with_arguments(const Plan& plan, const Stack& arguments, Stack results) {
  for (size_t i = 0; i < plan.returned_arguments.size(); ++i) {
    if (const auto argument = plan.returned_arguments[i]) {
      results.at(i) = arguments.at(*argument);
    }
  }
  return results;
}

void fit_out(const c10::IValue& out, const at::Tensor& like) {
  if (out.toTensor().sizes() == like.sizes()) return;
  resize_tensor(out.toTensor(), like.sizes(), like.strides());
}

// ------------------------------------------------------------------ at once

void call_random(const c10::OperatorHandle& op, const Plan& plan, Stack& stack,
                 c10::DeviceIndex index) {
  if (!plan.generator) {
    const AsDefaultOfCpu as_default(index);
    return call(op, stack);
  }
  c10::IValue& given = stack.at(*plan.generator);
  const at::Generator ours =
      given.isNone() ? default_generator(index) : given.toGenerator();
  TORCH_CHECK(ours.device().type() == kType, "Expected a '", device(index),
              "' device type for generator but found '", ours.device(), "'");
  const at::Generator cpus = on_cpu(ours);
  given = cpus;
  call(op, stack);
  store_state(cpus, ours);
}

Stack run_drained(const c10::OperatorHandle& op, const Plan& plan,
                  const Stack& arguments, c10::Device where) {
  const c10::Stream stream = current_stream(where.index());
  Twins twins(c10::kCPU);
  Stack results = twins_of(twins, arguments);
  for (const size_t out : plan.outs) {
    results.at(out) = at::empty({0}, results.at(out).toTensor().options());
  }
  const Stack outs = results;  // the same tensors
  run_now(stream, [&] {
    if (plan.is_random) {
      call_random(op, plan, results, where.index());
    } else {
      call(op, results);
    }
  });
  const auto queue_copy = [&](const c10::IValue& from, const c10::IValue& to) {
    enqueue(stream, [name = op.schema().name(), from,
                     to = Twins(c10::kCPU).of(to)] { store(name, from, to); });
  };
  for (const size_t out : plan.outs) {
    fit_out(arguments.at(out), outs.at(out).toTensor());
    queue_copy(outs.at(out), arguments.at(out));
  }
  Stack given;
  for (size_t i = 0; i < results.size(); ++i) {
    given.push_back(result_like(results[i], where));
    if (!plan.returned_arguments.at(i)) queue_copy(results[i], given[i]);
  }
  return with_arguments(plan, arguments, std::move(given));
}

// --------------------------------------------------------------------- late

// Of 16-bit inputs the meta kernel gives statistics in float32, as CUDA does;
// the CPU's are of the type of the weights.
void correct(const std::string& name, const Stack& arguments, Stack& metas) {
  const bool is_layers = name == "aten::native_layer_norm";
  if (!is_layers && name != "aten::native_group_norm") return;
  const c10::IValue& weight = arguments.at(is_layers ? 2 : 1);
  const auto dtype =
      (weight.isNone() ? arguments.at(0) : weight).toTensor().scalar_type();
  for (size_t i = 1; i < 3; ++i) metas.at(i) = metas.at(i).toTensor().to(dtype);
}

// Returns what meta kernels give, and makes outputs of the caller as large.
std::optional<Stack> results_by_meta(const c10::OperatorHandle& op,
                                     const Plan& plan, const Stack& arguments) {
  Twins twins(c10::kMeta);
  Stack metas = twins_of(twins, arguments);
  const Stack before = metas;
  try {
    call(op, metas);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  correct(op.schema().name(), arguments, metas);
  for (const size_t out : plan.outs) {
    fit_out(arguments.at(out), before.at(out).toTensor());
  }
  return metas;
}

std::optional<Stack> run_late(const c10::OperatorHandle& op, const Plan& plan,
                              const Stack& arguments, c10::Device where) {
  Stack results(plan.returned_arguments.size());
  if (plan.needs_shapes) {
    const auto metas = results_by_meta(op, plan, arguments);
    if (!metas) return std::nullopt;
    for (size_t i = 0; i < results.size(); ++i) {
      if (plan.returned_arguments[i]) continue;
      results[i] = result_like(metas->at(i), where);
    }
  }
  Twins twins(c10::kCPU);
  Stack inputs = twins_of(twins, arguments);
  Stack outputs = twins_of(twins, results);
  enqueue(current_stream(where.index()),
          [op, inputs = std::move(inputs), outputs = std::move(outputs)] {
            Stack stack = inputs;
            call(op, stack);
            for (size_t i = 0; i < outputs.size(); ++i) {
              store(op.schema().name(), stack.at(i), outputs[i]);
            }
          });
  return with_arguments(plan, arguments, std::move(results));
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const auto last = torch::jit::last(*stack, num_arguments);
  const Stack arguments(last.begin(), last.end());
  const c10::Device where = device_of_call(op, arguments);
  const c10::DeviceGuard guard(where);
  const Plan& plan = plan_of(op);
  std::string way = plan.reason;
  std::optional<Stack> results;
  if (way.empty()) {
    results = run_late(op, plan, arguments, where);
    way = results ? "late" : "no meta kernel";
  }
  count_call(op.schema().name(), way);
  if (!results) results = run_drained(op, plan, arguments, where);
  torch::jit::drop(*stack, num_arguments);
  for (c10::IValue& result : *results) stack->push_back(std::move(result));
}

void count_call(const std::string& name, const std::string& way) {
  const std::lock_guard lock(counts_mutex);
  ++calls[name][way];
}

std::map<std::string, std::map<std::string, int64_t>> counts() {
  const std::lock_guard lock(counts_mutex);
  return calls;
}

void reset_counts() {
  const std::lock_guard lock(counts_mutex);
  calls.clear();
}

}  // namespace smp::late
