#include "csrc/pipeline/callee.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <memory>
#include <unordered_map>
#include <utility>

#include "csrc/autograd/graph_begin.h"
#include "csrc/common/check.h"
#include "csrc/pipeline/served_graph.h"

namespace smp::pipeline {
namespace {

// Copies results whose memory outlives the call outside of them, such as a
// buffer's: other ranks may read a result after a later call has written there.
void copy_shared_memory(std::vector<at::Tensor>& results) {
  std::unordered_map<const c10::StorageImpl*, size_t> num_results;
  for (const at::Tensor& result : results) {
    if (result.defined() && result.has_storage()) {
      ++num_results[result.storage().unsafeGetStorageImpl()];
    }
  }
  for (at::Tensor& result : results) {
    if (!result.defined() || !result.has_storage()) continue;
    const c10::Storage& memory = result.storage();
    size_t& num = num_results[memory.unsafeGetStorageImpl()];
    if (memory.use_count() == num) continue;
    result = result.clone();
    --num;
  }
}

}  // namespace

Callee::Callee(const ModuleTable& modules, Messenger& messenger,
               Scheduler& scheduler, TensorDirectory& tensors, Caller& caller,
               WeightTasks& weights)
    : modules_(modules),
      messenger_(messenger),
      scheduler_(scheduler),
      tensors_(tensors),
      caller_(caller),
      weights_(weights) {}

void Callee::set_forward_handler(ForwardHandler handler) {
  forward_handler_ = std::move(handler);
}

void Callee::begin_step() {
  std::lock_guard<std::mutex> lock(mutex_);
  visits_.clear();
}

void Callee::clear() {
  records_.clear();
  queues_.clear();
}

void Callee::close() {
  clear();
  forward_handler_ = {};  // refers to the model, which refers to this
}

// ---------------------------------------------------------------- requests

void Callee::take(const Header& header, mailbox::Message&& message) {
  const size_t num_released = num_released_of(header);
  SMP_CHECK(num_released <= message.tensors.size(),
            "a request lacks tensors that it names");
  const size_t num_tensors = message.tensors.size() - num_released;
  for (size_t i = num_tensors; i < message.tensors.size(); ++i) {
    tensors_.release(message.tensors[i].ref, header.mb);
  }
  message.tensors.resize(num_tensors);

  const auto request = std::make_shared<Request>();
  request->header = header;
  request->caller = message.source_rank;
  Call& call = request->call;
  call.mb = header.mb;
  call.flags = header.flags & ((1 << kFlagBits) - 1);
  call.structure = std::move(message.bytes);
  request->hops = take_hops(call.structure);
  call.tensors = std::move(message.tensors);
  call.module_id = header.module_id;
  const Phase phase = header.kind == Kind::kBackwardRequest ? Phase::kBackward
                                                            : Phase::kForward;
  const auto service = std::make_shared<Service>();
  service->caller_rank = request->caller;
  service->caller_context = header.index;
  service->request_id = header.request_id;
  service->where = modules_.describe(phase, header.mb, call.module_id);
  TaskKey key{phase, header.mb, call.module_id, 0, 0};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    key.visit = visits_[{phase, header.mb, call.module_id}]++;
  }
  // Weak: a request that never starts must not keep itself alive.
  service->make_ready = [this, request, key,
                         weak = std::weak_ptr<Service>(service)] {
    const std::shared_ptr<Service> service = weak.lock();
    scheduler_.add_service(key, service->where,
                           static_cast<uint64_t>(request->header.path),
                           [this, request, service] {
                             run(*request);
                             finish(request->header, *service);
                           });
  };
  queues_.add(service);
  for (size_t i = 0; i < num_tensors; ++i) {
    mailbox::MessageTensor& tensor = call.tensors[i];
    if (tensor.ref.id < 0) continue;
    if (tensor.data.defined()) {  // named: later requests may use it too
      tensors_.put(tensor.ref, header.mb, {tensor.data, tensor.mark});
      continue;
    }
    queues_.expect(*service);
    tensors_.when_available(
        tensor.ref, header.mb,
        [this, service, request, i](memory::MarkedTensor made) {
          mailbox::MessageTensor& argument = request->call.tensors[i];
          argument.data = std::move(made.data);
          argument.mark = std::move(made.mark);
          queues_.arrived(service);
        });
  }
  queues_.arrived(service);
}

void Callee::run(Request& request) {
  switch (request.header.kind) {
    case Kind::kForwardRequest:
      return run_forward(request);
    case Kind::kBackwardRequest:
      return run_backward(request);
    default:
      return run_operation(request);
  }
}

void Callee::finish(const Header& header, const Service& service) {
  Context& context = *current_context();
  if (context.caller.context_id != 0) caller_.finish(context);
  const auto last = queues_.finish(service);
  if (!last) return;
  Header answer = messenger_.header_of(Kind::kRequestsDone, header.mb);
  answer.index = service.caller_context;
  answer.request_id = *last;
  messenger_.post(service.caller_rank, answer);
}

// ---------------------------------------------------------------- forwards

// Detaches the arguments. The module does not get leaves, so that it may write
// to them.
void Callee::open_inputs(Call& call, bool grad, CallRecord& record) const {
  for (mailbox::MessageTensor& tensor : call.tensors) {
    tensor.data =
        tensors_.use({std::move(tensor.data), std::exchange(tensor.mark, {})})
            .detach();
    auto& input = record.inputs.emplace_back();
    if (!grad || !tensor.requires_grad) continue;
    input = autograd::begin_graph(tensor.data);
  }
}

void Callee::check_expected(const Request& request,
                            const ResultMeta& actual) const {
  const Header& header = request.header;
  if (header.flags & kWantsMeta) return;
  SMP_CHECK(actual.digest() == header.forward_id, "module '",
            modules_.name_of(header.module_id),
            "' returned something else than before for the same kind of "
            "arguments (shapes, dtypes, structure or requires_grad of its "
            "results changed), and its caller on global_rank ",
            request.caller,
            " went on with what it had seen. Put the module on the partition "
            "of its parent, or let its result depend on the shapes of its "
            "arguments only");
}

void Callee::run_forward(Request& request) {
  const Header& header = request.header;
  ++num_served_calls_;
  const bool grad = (header.flags & kGradEnabled) != 0;
  at::AutoGradMode grad_mode(grad);
  CallRecord record;
  record.mb = header.mb;
  record.module_id = header.module_id;
  open_inputs(request.call, grad, record);
  std::vector<at::Tensor> opened;
  std::vector<int64_t> versions;
  for (const mailbox::MessageTensor& tensor : request.call.tensors) {
    opened.push_back(tensor.data);
    versions.push_back(tensor.data._version());
  }
  Call result = forward_handler_(std::move(request.call));
  ResultMeta meta;
  meta.structure = std::move(result.structure);
  meta.has_values = result.has_values;
  find_shared(opened, result.tensors, (header.flags & kStrided) == 0, meta);
  for (size_t i = 0; i < opened.size(); ++i) {
    if (opened[i]._version() == versions[i]) continue;
    SMP_CHECK(i < 255, "module '", modules_.name_of(header.module_id),
              "' changed its tensor argument number ", i,
              " in place; this works for the first 255 only");
    meta.changed_args.push_back(static_cast<int>(i));
    result.tensors.emplace_back();
    result.tensors.back().data = std::move(opened[i]);
  }
  opened.clear();
  std::vector<at::Tensor> data;
  for (const mailbox::MessageTensor& tensor : result.tensors) {
    meta.tensors.push_back(TensorMeta::of(tensor.data));
    meta.tensors.back().requires_grad = grad && passes_grad(tensor.data);
    record.outputs.push_back(meta.tensors.back().requires_grad
                                 ? GraphEdge::of(tensor.data)
                                 : GraphEdge());
    data.push_back(tensor.data.detach());
  }
  for (const ViewOfArgument& view : meta.views) {
    record.outputs[view.result_idx] = {};
    data[view.result_idx] = at::Tensor();
  }
  check_expected(request, meta);
  result.tensors.clear();
  copy_shared_memory(data);
  if (grad) {
    records_.put({request.caller, header.request_id}, std::move(record));
  }
  if (header.flags & kWantsMeta) {
    Header answer = header;
    answer.kind = Kind::kForwardMeta;
    messenger_.post(request.caller, answer, meta.encode());
  }
  tensors_.offer(header, request.caller, data, request.hops);
}

// --------------------------------------------------------------- backwards

void Callee::run_backward(Request& request) {
  const Header& header = request.header;
  CallRecord record = records_.take({request.caller, header.forward_id});
  auto& grads = request.call.tensors;
  SMP_ASSERT(grads.size() == record.outputs.size(), "got ", grads.size(),
             " gradients for ", record.outputs.size(), " results");
  std::vector<GraphEdge> roots;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].data.defined() || !record.outputs[i].node) continue;
    roots.push_back(std::move(record.outputs[i]));
    root_grads.push_back(
        tensors_.use({std::move(grads[i].data), std::move(grads[i].mark)}));
  }
  record.outputs.clear();
  std::vector<at::Tensor> input_grads =
      input_grads_of(request, record, roots, std::move(root_grads));
  std::string defined;
  for (const at::Tensor& grad : input_grads) {
    defined += grad.defined() ? '1' : '0';
  }
  roots.clear();
  record = {};
  if (header.flags & kWantsMeta) {
    Header answer = header;
    answer.kind = Kind::kBackwardMeta;
    messenger_.post(request.caller, answer, defined);
  } else {
    SMP_CHECK(defined == request.call.structure, "the arguments of module '",
              modules_.name_of(header.module_id),
              "' that get gradients changed from one call to the next (",
              request.call.structure, ", now ", defined,
              "), and its caller on global_rank ", request.caller,
              " went on with what it had seen. Put the module on the partition "
              "of its parent");
  }
  tensors_.offer(header, request.caller, input_grads, request.hops);
}

// Returns gradients of the inputs. Gradients of parameters are added, now or
// later.
std::vector<at::Tensor> Callee::input_grads_of(
    const Request& request, const CallRecord& record,
    const std::vector<GraphEdge>& roots, std::vector<at::Tensor> root_grads) {
  if (auto grads = weights_.begin_backward(
          request.header, request.call.module_id, record, roots, root_grads)) {
    return *std::move(grads);
  }
  run_backward_of(roots, std::move(root_grads));
  std::vector<at::Tensor> grads(record.inputs.size());
  for (size_t i = 0; i < record.inputs.size(); ++i) {
    if (record.inputs[i]) grads[i] = autograd::take_grad(*record.inputs[i]);
    const RemoteRefPtr ref = remote_ref_of(grads[i]);
    grads[i] =
        ref ? tensors_.fetch_to_own(ref) : dense_grad(std::move(grads[i]));
  }
  return grads;
}

void Callee::run_operation(Request& request) {
  at::AutoGradMode no_grad(false);
  std::vector<at::Tensor> tensors;
  for (const mailbox::MessageTensor& tensor : request.call.tensors) {
    tensors.push_back(tensors_.use({tensor.data, tensor.mark}));
  }
  const Operation operation = Operation::decode(request.call.structure);
  tensors_.offer(request.header, request.caller, {operation.run(tensors)},
                 request.hops);
}

}  // namespace smp::pipeline
