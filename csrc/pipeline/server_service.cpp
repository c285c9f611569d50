// The owner's side of remote calls: what a request makes this rank do.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/memory/random_state.h"
#include "csrc/pipeline/server.h"

namespace smp::pipeline {

void Server::serve_forward(const Header& header, comm::Message& message) {
  auto call = std::make_shared<Call>();
  call->module_id = header.module_id;
  call->mb = header.mb;
  call->flags = header.flags;
  call->structure = std::move(message.bytes);
  call->tensors = std::move(message.tensors);
  scheduler_.add_service(
      Phase::kForward, static_cast<int>(header.mb), header.module_id,
      describe_task(Phase::kForward, header.mb, header.module_id),
      static_cast<uint64_t>(header.path),
      [this, header, call, caller = message.source_rank] {
        run_forward(header, caller, *call);
      });
}

void Server::run_forward(const Header& header, int caller, Call& call) {
  ++num_served_calls_;
  const bool grad = (header.flags & kGradEnabled) != 0;
  at::AutoGradMode grad_mode(grad);
  CallRecord record;
  record.mb = header.mb;
  record.module_id = header.module_id;
  std::vector<int64_t> versions;
  for (comm::MessageTensor& tensor : call.tensors) {
    tensor.data = to_device(std::move(tensor.data));
    if (grad && tensor.requires_grad) tensor.data.set_requires_grad(true);
    record.inputs.push_back(tensor.data);
    versions.push_back(tensor.data._version());
  }
  Call result = forward_handler_(std::move(call));
  for (size_t i = 0; i < record.inputs.size(); ++i) {
    SMP_CHECK(record.inputs[i]._version() == versions[i], "module '",
              module_name(header.module_id),
              "' changed one of its arguments in place; its caller on "
              "global_rank ",
              caller,
              " cannot see that. Use the out-of-place form (inplace=False), "
              "or put both on one partition");
  }
  for (comm::MessageTensor& tensor : result.tensors) {
    tensor.requires_grad = grad && tensor.data.requires_grad();
    tensor.ref = {options_.global_rank, next_ref_id_++};
    record.outputs.push_back(tensor.requires_grad ? tensor.data : at::Tensor());
    tensor.data = tensor.data.detach();
  }
  if (grad) records_.put({caller, header.request_id}, std::move(record));
  Header answer = header;
  answer.kind = Kind::kForwardResponse;
  post(caller, answer, result.structure, std::move(result.tensors));
}

void Server::serve_backward(const Header& header, comm::Message& message) {
  auto grads = std::make_shared<std::vector<comm::MessageTensor>>(
      std::move(message.tensors));
  const int caller = message.source_rank;
  const int64_t module_id = records_.module_of({caller, header.forward_id});
  scheduler_.add_service(
      Phase::kBackward, static_cast<int>(header.mb), module_id,
      describe_task(Phase::kBackward, header.mb, module_id),
      static_cast<uint64_t>(header.path),
      [this, header, grads, caller] { run_backward(header, caller, *grads); });
}

void Server::run_backward(const Header& header, int caller,
                          const std::vector<comm::MessageTensor>& grads) {
  CallRecord record = records_.take({caller, header.forward_id});
  SMP_ASSERT(grads.size() == record.outputs.size(), "got ", grads.size(),
             " gradients for ", record.outputs.size(), " results");
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].data.defined() || !record.outputs[i].defined()) continue;
    roots.push_back(record.outputs[i]);
    root_grads.push_back(to_device(grads[i].data));
  }
  torch::autograd::backward(roots, root_grads);
  std::vector<comm::MessageTensor> input_grads(record.inputs.size());
  for (size_t i = 0; i < record.inputs.size(); ++i) {
    if (record.inputs[i].requires_grad()) {
      input_grads[i].data = record.inputs[i].grad();
    }
  }
  record = {};
  Header answer = header;
  answer.kind = Kind::kBackwardResponse;
  post(caller, answer, {}, std::move(input_grads));
}

}  // namespace smp::pipeline
