#include "csrc/gradients/reduced_parameters.h"

#include "csrc/common/check.h"

namespace smp::gradients {

void check_parameters(const ReducedParameters& parameters,
                      const ReducerOptions& options) {
  const auto& [params, targets, records] = parameters;
  SMP_CHECK_VALUE(options.passes_per_reduction >= 1,
                  "backward_passes_per_step must be >= 1, got ",
                  options.passes_per_reduction);
  SMP_CHECK_VALUE(!options.applies() || (!options.is_sharded() &&
                                         options.passes_per_reduction == 1),
                  "gradients that are applied as soon as they are summed are "
                  "neither sharded nor added up over several steps");
  SMP_CHECK_VALUE(
      params.size() == records.size() && targets.size() == records.size(),
      "expected one record and target per parameter, got ", records.size(),
      " records and ", targets.size(), " targets for ", params.size(),
      " parameters");
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const at::Tensor& target = targets[i];
    const ParameterRecord& record = records[i];
    SMP_CHECK_VALUE(param.is_leaf() && param.requires_grad(), "parameter ",
                    record.name, " must be a leaf that requires a gradient");
    SMP_CHECK_VALUE(param.sizes() == at::IntArrayRef(record.local_shape()) &&
                        param.scalar_type() == record.dtype,
                    "parameter ", record.name, " has sizes ", param.sizes(),
                    " and dtype ", param.scalar_type(), ", its record says ",
                    record.describe());
    SMP_CHECK_VALUE(param.device() == params.front().device(), "parameter ",
                    record.name, " is on ", param.device(), ", ",
                    records.front().name, " on ", params.front().device(),
                    "; move the model to one device per rank");
    SMP_CHECK_VALUE(record.group == records.front().group, "parameter ",
                    record.describe(), " is reduced over another group than ",
                    records.front().describe(), "; a reducer serves one group");
    if (!target.defined()) continue;
    const bool has_dtype = target.scalar_type() == record.accumulation_dtype ||
                           target.scalar_type() == record.dtype;
    SMP_CHECK_VALUE(
        target.is_leaf() && target.device() == param.device() && has_dtype,
        "the target of parameter ", record.name, " has dtype ",
        target.scalar_type(), " on ", target.device(), "; expected a leaf on ",
        param.device(), " for ", record.describe());
    SMP_CHECK_VALUE(options.is_sharded() || target.sizes() == param.sizes(),
                    "the target of parameter ", record.name, " has sizes ",
                    target.sizes(), "; expected ", param.sizes());
  }
}

}  // namespace smp::gradients
