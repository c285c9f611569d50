#include "csrc/pipeline/caller.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

Route::Hops hops_of(const std::shared_ptr<Route>& route) {
  Route::Hops hops = route ? route->hops() : Route::Hops();
  if (hops.size() > 127) hops.resize(127);  // the rest is ordered one by one
  return hops;
}

}  // namespace

Caller::Caller(bool runs_ahead, const ModuleTable& modules,
               Messenger& messenger, Scheduler& scheduler,
               TensorDirectory& tensors)
    : runs_ahead_(runs_ahead),
      modules_(modules),
      messenger_(messenger),
      scheduler_(scheduler),
      tensors_(tensors) {}

// ---------------------------------------------------------------- requests

Header Caller::request_header(Context& context, Kind kind) {
  CallerState& caller = context.caller;
  if (caller.context_id == 0) caller.context_id = next_context_id_++;
  Header header = messenger_.header_of(kind, context.key.mb);
  header.request_id = tensors_.next_id();
  header.index = caller.context_id;
  return header;
}

void Caller::send_request(Context& context, int owner, Header& header,
                          const std::string& structure,
                          std::vector<mailbox::MessageTensor> tensors,
                          std::shared_ptr<Slot> slot) {
  const auto released = tensors_.take_released(owner, header.mb);
  if (slot) {
    header.flags |= kWantsMeta;
    std::lock_guard<std::mutex> lock(mutex_);
    requests_[header.request_id] = std::move(slot);
  }
  context.caller.issued[owner] = header.request_id;
  ++num_requests_;
  header.flags |= static_cast<int64_t>(released.size()) << kFlagBits;
  for (const mailbox::Ref& ref : released) {
    tensors.emplace_back();
    tensors.back().ref = ref;
  }
  messenger_.post(owner, header, structure, std::move(tensors));
}

mailbox::Message Caller::wait_for_meta(int owner, const Header& header,
                                       const std::shared_ptr<Slot>& slot,
                                       const char* waits_for) {
  struct Forget {
    Caller* caller;
    int64_t id;
    ~Forget() {
      std::lock_guard<std::mutex> lock(caller->mutex_);
      caller->requests_.erase(id);
    }
  } forget{this, header.request_id};
  return scheduler_.wait(*slot, waits_for, owner);
}

// Checks the arguments before anything is noted as sent.
void Caller::check_arguments(int64_t module_id,
                             const std::vector<at::Tensor>& inputs) const {
  SMP_CHECK_VALUE(static_cast<int64_t>(inputs.size()) < kMaxResults, "module '",
                  modules_.name_of(module_id), "' on another rank gets ",
                  inputs.size(), " tensors; at most ", kMaxResults - 1,
                  " can travel");
  for (const at::Tensor& input : inputs) {
    SMP_CHECK_VALUE(input.layout() == at::kStrided, "module '",
                    modules_.name_of(module_id),
                    "' on another rank gets a tensor of layout ",
                    input.layout(), "; only dense tensors can travel");
  }
}

// ------------------------------------------------------------------- calls

IssuedCall Caller::call_forward(int owner_rank, int64_t module_id,
                                int64_t flags, const std::string& structure,
                                const std::string& mode,
                                const std::vector<at::Tensor>& inputs) {
  Context& context = calling_context(
      "calling module '" + modules_.name_of(module_id) +
      "', which lives on global_rank " + std::to_string(owner_rank) + ",");
  std::string key = std::to_string(module_id) + '/' + std::to_string(flags) +
                    '/' + mode + '/' + structure;
  check_arguments(module_id, inputs);
  for (const at::Tensor& input : inputs) TensorMeta::of(input).append_to(key);
  IssuedCall call;
  call.owner_rank = owner_rank;
  call.module_id = module_id;
  call.expected = runs_ahead_ ? results_.find(key) : nullptr;

  Header header = request_header(context, Kind::kForwardRequest);
  header.module_id = module_id;
  header.flags = flags;
  header.path = call_path(static_cast<int64_t>(context.seed),
                          ++context.caller.num_calls, module_id);
  std::shared_ptr<Slot> slot;
  std::shared_ptr<Route> route;
  if (call.expected) {
    header.forward_id = call.expected->digest;
    call.visit = context.caller.visits[call.expected.get()]++;
    route = route_of(call.expected->routes, call.visit);
  } else {
    slot = std::make_shared<Slot>();
  }
  const Route::Hops hops = hops_of(route);
  std::vector<mailbox::MessageTensor> tensors;
  tensors.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    tensors.push_back(tensors_.address(context, owner_rank, input));
    tensors.back().requires_grad &= (flags & kGradEnabled) != 0;
  }
  call.request_id = header.request_id;
  send_request(context, owner_rank, header, with_hops(hops, structure),
               std::move(tensors), slot);
  if (slot) {
    const mailbox::Message answer =
        wait_for_meta(owner_rank, header, slot, "the result of a module");
    call.expected = results_.put(key, ResultMeta::decode(answer.bytes));
    call.visit = context.caller.visits[call.expected.get()]++;
    route = route_of(call.expected->routes, call.visit);
  }
  call.results = name_results(context, header, call, route, hops);
  return call;
}

// Names the results; null where the result is a view of an argument.
std::vector<RemoteRefPtr> Caller::name_results(
    Context& context, const Header& header, const IssuedCall& call,
    const std::shared_ptr<Route>& route, const Route::Hops& hops) {
  const ResultMeta& result = call.expected->result;
  SMP_CHECK_VALUE(static_cast<int64_t>(result.tensors.size()) < kMaxResults,
                  "module '", modules_.name_of(call.module_id), "' returned ",
                  result.tensors.size(), " tensors to another rank; at most ",
                  kMaxResults - 1, " can travel");
  std::vector<bool> is_view(result.tensors.size());
  for (const ViewOfArgument& view : result.views) {
    is_view.at(view.result_idx) = true;
  }
  std::vector<RemoteRefPtr> refs(result.tensors.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    if (is_view[i]) continue;
    refs[i] = tensors_.name_result(context, header, call.owner_rank,
                                   static_cast<int>(i), result.tensors[i],
                                   route, hops);
  }
  return refs;
}

std::vector<RemoteRefPtr> Caller::call_backward(
    const IssuedCall& call, const std::vector<TensorMeta>& inputs,
    const std::vector<at::Tensor>& grads) {
  Context& context = calling_context(
      "the backward of a module on global_rank " +
      std::to_string(call.owner_rank) + " outside of model.backward");
  std::string mask;
  for (const at::Tensor& grad : grads) mask += grad.defined() ? '1' : '0';
  Header header = request_header(context, Kind::kBackwardRequest);
  header.forward_id = call.request_id;
  header.module_id = call.module_id;
  auto& known = call.expected->grads;
  auto found = runs_ahead_ ? known.find(mask) : known.end();
  const bool is_known = found != known.end();
  const auto slot = is_known ? nullptr : std::make_shared<Slot>();
  const auto route =
      route_of(call.expected->grad_routes, std::pair{mask, call.visit});
  const Route::Hops hops = is_known ? hops_of(route) : Route::Hops();
  std::vector<mailbox::MessageTensor> tensors;
  tensors.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    tensors.push_back(tensors_.address(context, call.owner_rank, grad));
  }
  send_request(context, call.owner_rank, header,
               with_hops(hops, is_known ? found->second : std::string()),
               std::move(tensors), slot);
  std::string defined;
  if (is_known) {
    defined = found->second;
  } else {
    defined = wait_for_meta(call.owner_rank, header, slot, "gradients").bytes;
    if (!call.expected->result.has_values) known[mask] = defined;
  }
  std::vector<RemoteRefPtr> results(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (defined.at(i) != '1') continue;
    TensorMeta meta = inputs[i];
    meta.requires_grad = false;
    results[i] = tensors_.name_result(context, header, call.owner_rank,
                                      static_cast<int>(i), meta, route, hops);
    results[i]->is_gradient = true;
  }
  return results;
}

RemoteRefPtr Caller::call_operation(const Operation& operation,
                                    const std::vector<RemoteRefPtr>& inputs) {
  Context& context = calling_context("arithmetic on another rank");
  // The rank with the youngest tensor computes: the others have most likely
  // arrived there.
  RemoteRefPtr youngest = inputs.at(0);
  for (const RemoteRefPtr& input : inputs) {
    if (input->ref.id > youngest->ref.id) youngest = input;
  }
  const int owner = youngest->home_rank;
  Header header = request_header(context, Kind::kOperation);
  header.module_id = kOperationId;
  std::vector<mailbox::MessageTensor> tensors;
  for (const RemoteRefPtr& input : inputs) {
    tensors.push_back(tensors_.address_ref(context, owner, *input));
  }
  send_request(context, owner, header, with_hops({}, operation.encode()),
               std::move(tensors), nullptr);
  TensorMeta meta = youngest->meta;
  meta.requires_grad = false;
  const RemoteRefPtr result =
      tensors_.name_result(context, header, owner, 0, meta, nullptr, {});
  result->is_gradient = youngest->is_gradient;
  return result;
}

std::vector<int64_t> Caller::seeds_of_next_calls(
    const std::vector<int64_t>& module_ids) const {
  const Context& context = calling_context("calling several modules at once");
  std::vector<int64_t> seeds;
  for (const int64_t module_id : module_ids) {
    const auto idx = static_cast<int64_t>(seeds.size());
    seeds.push_back(call_path(static_cast<int64_t>(context.seed),
                              context.caller.num_calls + 1 + idx, module_id));
  }
  return seeds;
}

void Caller::skip_calls(int num_calls) {
  calling_context("calling several modules at once").caller.num_calls +=
      num_calls;
}

// ----------------------------------------------------------------- answers

void Caller::finish(Context& context) {
  tensors_.settle(context);
  await_requests(context);
}

void Caller::await_requests(Context& context) {
  const CallerState& caller = context.caller;
  if (caller.issued.empty()) return;
  const auto slot = std::make_shared<Slot>();
  int awaited = caller.issued.begin()->first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& acks = acks_[caller.context_id];
    bool all_done = true;
    for (const auto& [owner, last] : caller.issued) {
      if (acks[owner] >= last) continue;
      all_done = false;
      awaited = owner;
    }
    if (all_done) {
      slot->message.emplace();
    } else {
      ack_waits_[caller.context_id] = {caller.issued, slot};
    }
  }
  scheduler_.wait(*slot, "the end of its requests", awaited);
  std::lock_guard<std::mutex> lock(mutex_);
  ack_waits_.erase(caller.context_id);
  acks_.erase(caller.context_id);
}

void Caller::take(const Header& header, mailbox::Message&& message) {
  if (header.kind == Kind::kRequestsDone) {
    take_done(header, message.source_rank);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = requests_.find(header.request_id);
  if (found != requests_.end()) {  // else its context was cancelled
    scheduler_.fill(*found->second, std::move(message));
  }
}

void Caller::take_done(const Header& header, int owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& acks = acks_[header.index];
  acks[owner] = header.request_id;
  const auto waiting = ack_waits_.find(header.index);
  if (waiting == ack_waits_.end()) return;
  for (const auto& [rank, last] : waiting->second.issued) {
    if (acks[rank] < last) return;
  }
  scheduler_.fill(*waiting->second.slot, {});
}

void Caller::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  requests_.clear();
  acks_.clear();
  ack_waits_.clear();
}

}  // namespace smp::pipeline
