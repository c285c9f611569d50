// What other ranks ask of this one: requests as contexts of their own.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <memory>
#include <utility>

#include "csrc/autograd/graph_begin.h"
#include "csrc/common/check.h"
#include "csrc/pipeline/server.h"

namespace smp::pipeline {
namespace {

// Inverse of with_hops in server_calls.cpp.
Route::Hops take_hops(std::string& bytes) {
  SMP_CHECK(!bytes.empty(), "a request has no route");
  const auto count = static_cast<uint8_t>(bytes[0]);
  SMP_CHECK(bytes.size() >= 1 + count * 2 * sizeof(int32_t),
            "the route of a request ends early");
  Route::Hops hops;
  for (size_t i = 0; i < count; ++i) {
    int32_t pair[2];
    std::memcpy(pair, bytes.data() + 1 + i * sizeof pair, sizeof pair);
    hops.emplace_back(pair[0], pair[1]);
  }
  bytes.erase(0, 1 + count * 2 * sizeof(int32_t));
  return hops;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.numel() > 0
             ? tensor.storage().unsafeGetStorageImpl()
             : nullptr;
}

// Whether gradients pass. A view that was made without gradients of something
// that has them says that it requires them, and has no graph.
bool passes_grad(const at::Tensor& tensor) {
  return tensor.requires_grad() && (tensor.grad_fn() || !tensor.is_view());
}

// Finds results that are views of arguments, and says of others whether they
// share memory with arguments or with each other.
void find_shared(const std::vector<at::Tensor>& arguments,
                 const std::vector<mailbox::MessageTensor>& results,
                 bool callers_are_contiguous, ResultMeta& meta) {
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& result = results[i].data;
    const void* const storage = storage_of(result);
    if (!storage) continue;
    bool is_view = false;
    for (size_t j = 0; j < arguments.size() && !is_view; ++j) {
      if (storage_of(arguments[j]) != storage) continue;
      if (result.scalar_type() == arguments[j].scalar_type() &&
          arguments[j].is_contiguous() && callers_are_contiguous &&
          passes_grad(result) == passes_grad(arguments[j])) {
        is_view = true;
        meta.views.push_back(
            {static_cast<int>(i), static_cast<int>(j), result.sizes().vec(),
             result.strides().vec(),
             result.storage_offset() - arguments[j].storage_offset()});
      } else {
        meta.shares_memory = true;
      }
    }
    for (size_t j = 0; j < i && !is_view; ++j) {
      if (storage_of(results[j].data) == storage) meta.shares_memory = true;
    }
  }
}

// Gives the gradients of results to their graph, and keeps none of them while
// it runs, as whoever calls the engine with gradients does.
class ResultGradsNode : public torch::autograd::Node {
 public:
  ResultGradsNode(torch::autograd::variable_list grads,
                  torch::autograd::edge_list edges)
      : Node(std::move(edges)), grads_(std::move(grads)) {}
  std::string name() const override { return "SmpResultGradsBackward"; }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&&) override {
    return std::exchange(grads_, {});
  }

 private:
  torch::autograd::variable_list grads_;
};

// Adds gradients of leaves, and brings those of arguments to their nodes.
void run_backward_of(const std::vector<GraphEdge>& roots,
                     std::vector<at::Tensor> root_grads) {
  if (roots.empty()) return;
  torch::autograd::edge_list edges;
  for (const GraphEdge& root : roots) {
    edges.emplace_back(root.node, root.input_nr);
  }
  const at::Tensor begin = at::zeros({}, root_grads[0].options());
  const auto feed = std::make_shared<ResultGradsNode>(std::move(root_grads),
                                                      std::move(edges));
  feed->add_input_metadata(begin);
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::Edge(feed, 0)}, {begin}, /*keep_graph=*/false,
      /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace

// Reads a request and queues it; it runs when its turn has come and all its
// tensors are here.
void Server::serve(const Header& header, mailbox::Message&& message) {
  const int caller = message.source_rank;
  const size_t num_released = num_released_of(header);
  SMP_CHECK(num_released <= message.tensors.size(),
            "a request lacks tensors that it names");
  const size_t num_tensors = message.tensors.size() - num_released;
  for (size_t i = num_tensors; i < message.tensors.size(); ++i) {
    store_.release(message.tensors[i].ref, header.mb);
  }
  message.tensors.resize(num_tensors);

  auto call = std::make_shared<Call>();
  call->mb = header.mb;
  call->flags = header.flags & ((1 << kFlagBits) - 1);
  call->structure = std::move(message.bytes);
  const Route::Hops hops = take_hops(call->structure);
  call->tensors = std::move(message.tensors);
  call->module_id = header.module_id;
  const Phase phase = header.kind == Kind::kBackwardRequest ? Phase::kBackward
                                                            : Phase::kForward;
  const auto service = std::make_shared<Service>();
  service->caller_rank = caller;
  service->caller_context = header.index;
  service->request_id = header.request_id;
  service->where = describe_task(phase, header.mb, call->module_id);
  int64_t visit = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    visit = visits_[{phase, header.mb, call->module_id}]++;
  }
  // Weak: a request that never starts must not keep itself alive.
  service->make_ready = [this, header, caller, call, hops, phase, visit,
                         weak = std::weak_ptr<Service>(service)] {
    const std::shared_ptr<Service> service = weak.lock();
    scheduler_.add_service({phase, header.mb, call->module_id, visit, 0},
                           service->where, static_cast<uint64_t>(header.path),
                           [this, header, caller, call, hops, service] {
                             if (header.kind == Kind::kForwardRequest) {
                               run_forward(header, caller, *call, hops);
                             } else if (header.kind == Kind::kBackwardRequest) {
                               run_backward(header, caller, *call, hops);
                             } else {
                               run_operation(header, caller, *call, hops);
                             }
                             finish_service(header, *service);
                           });
  };
  queues_.add(service);
  for (size_t i = 0; i < num_tensors; ++i) {
    mailbox::MessageTensor& tensor = call->tensors[i];
    if (tensor.ref.id < 0) continue;
    if (tensor.data.defined()) {  // comes under a name, for later requests too
      store_.put(tensor.ref, header.mb, tensor.data);
      continue;
    }
    queues_.expect(*service);
    store_.when_available(tensor.ref, header.mb,
                          [this, service, call, i](at::Tensor data) {
                            call->tensors[i].data = std::move(data);
                            queues_.arrived(service);
                          });
  }
  queues_.arrived(service);
}

void Server::finish_service(const Header& header, const Service& service) {
  Context& context = *current_context();
  if (context.caller.context_id != 0) {
    settle(context);
    await_requests(context);
  }
  const auto last = queues_.finish(service);
  if (!last) return;
  Header answer = header_of(Kind::kRequestsDone, header.mb);
  answer.index = service.caller_context;
  answer.request_id = *last;
  post(service.caller_rank, answer, {}, {});
}

// Stores results under the names that the caller gave them and sends them on.
void Server::offer(const Header& header, int caller,
                   const std::vector<at::Tensor>& results,
                   const Route::Hops& hops) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const mailbox::Ref ref{
        caller, header.request_id * kMaxResults + static_cast<int64_t>(i)};
    // Before the data are: they may be released as soon as they are stored.
    for (const auto& [idx, rank] : hops) {
      if (idx == static_cast<int>(i)) push(ref, header.mb, rank);
    }
    store_.put(ref, header.mb, results[i]);
  }
}

void Server::push(const mailbox::Ref& ref, int64_t mb, int dst) {
  store_.when_available(ref, mb, [this, ref, mb, dst](at::Tensor data) {
    std::vector<mailbox::MessageTensor> tensors(1);
    tensors[0].ref = ref;
    tensors[0].data = std::move(data);
    post(dst, header_of(Kind::kData, mb), {}, std::move(tensors));
  });
}

void Server::check_expected(const Header& header, int caller,
                            const ResultMeta& actual) const {
  if (header.flags & kWantsMeta) return;
  SMP_CHECK(actual.digest() == header.forward_id, "module '",
            module_name(header.module_id),
            "' returned something else than before for the same kind of "
            "arguments (shapes, dtypes, structure or requires_grad of its "
            "results changed), and its caller on global_rank ",
            caller,
            " went on with what it had seen. Put the module on the partition "
            "of its parent, or let its result depend on the shapes of its "
            "arguments only");
}

// The arguments as the module gets them: not as leaves, so that it may write to
// them.
void Server::open_inputs(Call& call, bool grad, CallRecord& record) const {
  for (mailbox::MessageTensor& tensor : call.tensors) {
    tensor.data = to_device(std::move(tensor.data)).detach();
    auto& input = record.inputs.emplace_back();
    if (!grad || !tensor.requires_grad) continue;
    input = autograd::begin_graph(tensor.data);
  }
}

void Server::run_forward(const Header& header, int caller, Call& call,
                         const Route::Hops& hops) {
  ++num_served_calls_;
  const bool grad = (header.flags & kGradEnabled) != 0;
  at::AutoGradMode grad_mode(grad);
  CallRecord record;
  record.mb = header.mb;
  record.module_id = header.module_id;
  open_inputs(call, grad, record);
  std::vector<at::Tensor> opened;
  std::vector<int64_t> versions;
  for (const mailbox::MessageTensor& tensor : call.tensors) {
    opened.push_back(tensor.data);
    versions.push_back(tensor.data._version());
  }
  Call result = forward_handler_(std::move(call));
  ResultMeta meta;
  meta.structure = std::move(result.structure);
  meta.has_values = result.has_values;
  find_shared(opened, result.tensors, (header.flags & kStrided) == 0, meta);
  for (size_t i = 0; i < opened.size(); ++i) {
    if (opened[i]._version() == versions[i]) continue;
    SMP_CHECK(i < 255, "module '", module_name(header.module_id),
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
  check_expected(header, caller, meta);
  result.tensors.clear();
  if (grad) records_.put({caller, header.request_id}, std::move(record));
  if (header.flags & kWantsMeta) {
    Header answer = header;
    answer.kind = Kind::kForwardMeta;
    post(caller, answer, meta.encode(), {});
  }
  offer(header, caller, data, hops);
}

void Server::run_backward(const Header& header, int caller, Call& call,
                          const Route::Hops& hops) {
  CallRecord record = records_.take({caller, header.forward_id});
  auto& grads = call.tensors;
  SMP_ASSERT(grads.size() == record.outputs.size(), "got ", grads.size(),
             " gradients for ", record.outputs.size(), " results");
  std::vector<GraphEdge> roots;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].data.defined() || !record.outputs[i].node) continue;
    roots.push_back(std::move(record.outputs[i]));
    root_grads.push_back(to_device(std::move(grads[i].data)));
  }
  record.outputs.clear();
  std::vector<at::Tensor> input_grads =
      run_graph(header, call.module_id, record, roots, std::move(root_grads));
  std::string defined;
  for (const at::Tensor& grad : input_grads) {
    defined += grad.defined() ? '1' : '0';
  }
  roots.clear();
  record = {};
  if (header.flags & kWantsMeta) {
    Header answer = header;
    answer.kind = Kind::kBackwardMeta;
    post(caller, answer, defined, {});
  } else {
    SMP_CHECK(defined == call.structure, "the arguments of module '",
              module_name(call.module_id),
              "' that get gradients changed from one call to the next (",
              call.structure, ", now ", defined,
              "), and its caller on global_rank ", caller,
              " went on with what it had seen. Put the module on the partition "
              "of its parent");
  }
  offer(header, caller, input_grads, hops);
}

// Gradients of the inputs; those of parameters are added, now or later.
std::vector<at::Tensor> Server::run_graph(const Header& header,
                                          int64_t module_id,
                                          const CallRecord& record,
                                          const std::vector<GraphEdge>& roots,
                                          std::vector<at::Tensor> root_grads) {
  if (auto grads =
          begin_split_backward(header, module_id, record, roots, root_grads)) {
    return *std::move(grads);
  }
  run_backward_of(roots, std::move(root_grads));
  std::vector<at::Tensor> grads(record.inputs.size());
  for (size_t i = 0; i < record.inputs.size(); ++i) {
    if (record.inputs[i]) grads[i] = autograd::take_grad(*record.inputs[i]);
    const RemoteRefPtr ref = remote_ref_of(grads[i]);
    grads[i] = ref ? fetch_to_own(ref) : dense_grad(std::move(grads[i]));
  }
  return grads;
}

void Server::run_operation(const Header& header, int caller, const Call& call,
                           const Route::Hops& hops) {
  at::AutoGradMode no_grad(false);
  std::vector<at::Tensor> tensors;
  for (const mailbox::MessageTensor& tensor : call.tensors) {
    tensors.push_back(to_device(tensor.data));
  }
  offer(header, caller, {Operation::decode(call.structure).run(tensors)}, hops);
}

}  // namespace smp::pipeline
