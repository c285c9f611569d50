// What contexts of this rank ask of other ranks.

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/pipeline/server.h"

namespace smp::pipeline {
namespace {

// Smaller tensors travel with each request: naming them costs more.
constexpr int64_t kInlineBytes = 1024;
// Outputs of the model up to this size go to all ranks at once.
constexpr int64_t kEagerOutputBytes = 64 * 1024;
// Route and structure as one byte string, which travels once (StructureCache).
std::string with_hops(const Route::Hops& hops, const std::string& structure) {
  std::string bytes;
  bytes.push_back(static_cast<char>(hops.size()));
  for (const auto& [idx, rank] : hops) {
    const int32_t pair[2] = {idx, rank};
    bytes.append(reinterpret_cast<const char*>(pair), sizeof pair);
  }
  return bytes + structure;
}

Route::Hops hops_of(const std::shared_ptr<Route>& route) {
  Route::Hops hops = route ? route->hops() : Route::Hops();
  if (hops.size() > 127) hops.resize(127);  // the rest is ordered one by one
  return hops;
}

bool holds(const RemoteRef& ref, int rank) {
  return ref.home_rank == rank ||
         std::find(ref.copies.begin(), ref.copies.end(), rank) !=
             ref.copies.end();
}

}  // namespace

Context& Server::calling_context(const std::string& what) const {
  Context* context = current_context();
  SMP_CHECK(context, what,
            " is possible inside a function decorated with @smp.step only");
  return *context;
}

at::Tensor Server::to_device(at::Tensor tensor) const {
  if (!tensor.defined() || tensor.device() == options_.device) return tensor;
  return tensor.to(options_.device);
}

// Peers of a deterministic server must suspend at the same places, and whether
// a call was seen before may differ between them.
bool Server::runs_ahead() const {
  return !(options_.deterministic && options_.order_ranks.size() > 1);
}

Header Server::request_header(Context& context, Kind kind) {
  CallerState& caller = context.caller;
  if (caller.context_id == 0) caller.context_id = next_context_id_++;
  Header header = header_of(kind, context.key.mb);
  header.request_id = next_request_id_++;
  header.index = caller.context_id;
  return header;
}

mailbox::MessageTensor Server::address_ref(Context& context, int dst,
                                           RemoteRef& ref) {
  SMP_CHECK(ref.mb == context.key.mb, "a result of microbatch ", ref.mb,
            " on another rank is an argument in microbatch ", context.key.mb,
            "; keep what microbatches share outside of the step function");
  if (!holds(ref, dst)) order_push(ref, dst);
  std::erase(ref.foreseen, dst);
  mailbox::MessageTensor result;
  result.ref = ref.ref;
  return result;
}

// Gives an argument its name and sees to it that its data get to `dst`.
mailbox::MessageTensor Server::address(Context& context, int dst,
                                       const at::Tensor& tensor) {
  mailbox::MessageTensor result;
  if (!tensor.defined()) return result;
  RemoteRefPtr ref = remote_ref_of(tensor);
  if (ref && !ref->kept.defined()) {
    result = address_ref(context, dst, *ref);
    result.requires_grad = tensor.requires_grad();
    return result;
  }
  result.requires_grad = tensor.requires_grad();
  const at::Tensor data = ref ? ref->kept : tensor.detach();
  if (ref || tensor.is_inference() ||
      static_cast<int64_t>(data.nbytes()) <= kInlineBytes) {
    result.data = data;
    return result;
  }
  ref = context.caller.find_sent(tensor);
  if (!ref) {
    ref = std::make_shared<RemoteRef>();
    ref->ref = {options_.global_rank, next_request_id_++ * kMaxResults};
    ref->home_rank = options_.global_rank;
    ref->mb = context.key.mb;
    ref->is_argument = true;
    ref->releases = releases_;
    context.caller.sent.push_back(
        {CallerState::WeakTensor(tensor.getIntrusivePtr()),
         static_cast<uint32_t>(tensor._version()), ref});
  }
  result.ref = ref->ref;
  if (std::find(ref->copies.begin(), ref->copies.end(), dst) ==
      ref->copies.end()) {
    ref->copies.push_back(dst);
    result.data = data;
  }
  return result;
}

void Server::order_push(RemoteRef& ref, int dst) {
  ref.copies.push_back(dst);
  if (ref.route) ref.route->add(ref.result_idx, dst);
  Header header = header_of(Kind::kPush, ref.mb);
  header.index = dst;
  std::vector<mailbox::MessageTensor> tensors(1);
  tensors[0].ref = ref.ref;
  post(ref.home_rank, header, {}, std::move(tensors));
  std::lock_guard<std::mutex> lock(stats_mutex_);
  ++stats_.pushes;
}

// Sorts what was released meanwhile by the ranks that hold it.
void Server::drain_releases(int64_t mb) {
  std::vector<mailbox::MessageTensor> own;
  for (ReleaseList::Released& released : releases_->take()) {
    for (const int holder : released.holders) {
      if (holder == options_.global_rank && options_.num_chunks > 1) {
        own.emplace_back();
        own.back().ref = released.ref;
      } else if (holder == options_.global_rank) {
        store_.release(released.ref, mb);
      } else {
        to_release_[holder].push_back(released.ref);
      }
    }
  }
  // Must not overtake the requests that a rank with several stages sends to
  // itself.
  if (!own.empty()) {
    post(options_.global_rank, header_of(Kind::kRelease, mb), {},
         std::move(own));
  }
}

void Server::send_request(Context& context, int owner, Header& header,
                          const std::string& structure,
                          std::vector<mailbox::MessageTensor> tensors,
                          std::shared_ptr<Slot> slot) {
  drain_releases(header.mb);
  std::vector<mailbox::Ref> released = std::exchange(to_release_[owner], {});
  if (slot) {
    header.flags |= kWantsMeta;
    std::lock_guard<std::mutex> lock(mutex_);
    requests_[header.request_id] = std::move(slot);
  }
  context.caller.issued[owner] = header.request_id;
  {
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.requests;
  }
  header.flags |= static_cast<int64_t>(released.size()) << kFlagBits;
  for (const mailbox::Ref& ref : released) {
    tensors.emplace_back();
    tensors.back().ref = ref;
  }
  post(owner, header, structure, std::move(tensors));
}

mailbox::Message Server::wait_for_meta(int owner, const Header& header,
                                       const std::shared_ptr<Slot>& slot,
                                       const char* waits_for) {
  struct Forget {
    Server* server;
    int64_t id;
    ~Forget() {
      std::lock_guard<std::mutex> lock(server->mutex_);
      server->requests_.erase(id);
    }
  } forget{this, header.request_id};
  return scheduler_.wait(*slot, waits_for, owner);
}

RemoteRefPtr Server::name_result(Context& context, const Header& header,
                                 int owner, int idx, const TensorMeta& meta,
                                 const std::shared_ptr<Route>& route,
                                 const Route::Hops& hops) {
  auto ref = std::make_shared<RemoteRef>();
  ref->ref = {options_.global_rank, header.request_id * kMaxResults + idx};
  ref->home_rank = owner;
  ref->mb = header.mb;
  ref->meta = meta;
  ref->route = route;
  ref->result_idx = idx;
  ref->releases = releases_;
  for (const auto& [hop_idx, rank] : hops) {
    if (hop_idx != idx) continue;
    ref->copies.push_back(rank);
    ref->foreseen.push_back(rank);
  }
  context.caller.add_ref(ref);
  return ref;
}

// Before anything is noted as sent.
void Server::check_arguments(int64_t module_id,
                             const std::vector<at::Tensor>& inputs) const {
  SMP_CHECK_VALUE(static_cast<int64_t>(inputs.size()) < kMaxResults, "module '",
                  module_name(module_id), "' on another rank gets ",
                  inputs.size(), " tensors; at most ", kMaxResults - 1,
                  " can travel");
  for (const at::Tensor& input : inputs) {
    SMP_CHECK_VALUE(input.layout() == at::kStrided, "module '",
                    module_name(module_id),
                    "' on another rank gets a tensor of layout ",
                    input.layout(), "; only dense tensors can travel");
  }
}

IssuedCall Server::call_forward(int owner_rank, int64_t module_id,
                                int64_t flags, const std::string& structure,
                                const std::string& mode,
                                const std::vector<at::Tensor>& inputs) {
  Context& context = calling_context(
      "calling module '" + module_name(module_id) +
      "', which lives on global_rank " + std::to_string(owner_rank) + ",");
  std::string key = std::to_string(module_id) + '/' + std::to_string(flags) +
                    '/' + mode + '/' + structure;
  check_arguments(module_id, inputs);
  for (const at::Tensor& input : inputs) TensorMeta::of(input).append_to(key);
  IssuedCall call;
  call.owner_rank = owner_rank;
  call.module_id = module_id;
  call.expected = runs_ahead() ? results_.find(key) : nullptr;

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
    tensors.push_back(address(context, owner_rank, input));
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
  const auto& metas = call.expected->result.tensors;
  SMP_CHECK_VALUE(static_cast<int64_t>(metas.size()) < kMaxResults, "module '",
                  module_name(module_id), "' returned ", metas.size(),
                  " tensors to another rank; at most ", kMaxResults - 1,
                  " can travel");
  std::vector<bool> is_view(metas.size());
  for (const ViewOfArgument& view : call.expected->result.views) {
    is_view.at(view.result_idx) = true;
  }
  for (size_t i = 0; i < metas.size(); ++i) {
    call.results.emplace_back();
    if (is_view[i]) continue;
    call.results.back() =
        (name_result(context, header, owner_rank, static_cast<int>(i), metas[i],
                     route, hops));
  }
  return call;
}

std::vector<int64_t> Server::seeds_of_next_calls(
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

void Server::skip_calls(int num_calls) {
  calling_context("calling several modules at once").caller.num_calls +=
      num_calls;
}

std::vector<RemoteRefPtr> Server::call_backward(
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
  auto found = runs_ahead() ? known.find(mask) : known.end();
  const bool is_known = found != known.end();
  const auto slot = is_known ? nullptr : std::make_shared<Slot>();
  const auto route =
      route_of(call.expected->grad_routes, std::pair{mask, call.visit});
  const Route::Hops hops = is_known ? hops_of(route) : Route::Hops();
  std::vector<mailbox::MessageTensor> tensors;
  tensors.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    tensors.push_back(address(context, call.owner_rank, grad));
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
    results[i] = name_result(context, header, call.owner_rank,
                             static_cast<int>(i), meta, route, hops);
    results[i]->is_gradient = true;
  }
  return results;
}

RemoteRefPtr Server::call_operation(const Operation& operation,
                                    const std::vector<RemoteRefPtr>& inputs) {
  Context& context = calling_context("arithmetic on another rank");
  // Where the youngest tensor is: the others have most likely arrived.
  RemoteRefPtr youngest = inputs.at(0);
  for (const RemoteRefPtr& input : inputs) {
    if (input->ref.id > youngest->ref.id) youngest = input;
  }
  const int owner = youngest->home_rank;
  Header header = request_header(context, Kind::kOperation);
  header.module_id = kOperationId;
  std::vector<mailbox::MessageTensor> tensors;
  for (const RemoteRefPtr& input : inputs) {
    tensors.push_back(address_ref(context, owner, *input));
  }
  send_request(context, owner, header, with_hops({}, operation.encode()),
               std::move(tensors), nullptr);
  TensorMeta meta = youngest->meta;
  meta.requires_grad = false;
  const RemoteRefPtr result =
      name_result(context, header, owner, 0, meta, nullptr, {});
  result->is_gradient = youngest->is_gradient;
  return result;
}

at::Tensor Server::fetch(const RemoteRefPtr& ref) {
  if (ref->kept.defined()) return ref->kept;
  Context& context =
      calling_context("reading a result of a module on global_rank " +
                      std::to_string(ref->home_rank));
  context.awaits_gradients |= ref->is_gradient;
  if (!holds(*ref, options_.global_rank)) {
    order_push(*ref, options_.global_rank);
    std::lock_guard<std::mutex> lock(stats_mutex_);
    ++stats_.fetches;
  }
  std::erase(ref->foreseen, options_.global_rank);
  const auto slot = std::make_shared<Slot>();
  store_.when_available(ref->ref, ref->mb, [this, slot](at::Tensor t) {
    mailbox::Message message;
    message.tensors.resize(1);
    message.tensors[0].data = std::move(t);
    scheduler_.fill(*slot, std::move(message));
  });
  mailbox::Message message =
      scheduler_.wait(*slot, "the data of a result", ref->home_rank);
  return to_device(std::move(message.tensors[0].data));
}

at::Tensor Server::fetch_to_own(const RemoteRefPtr& ref) {
  at::Tensor data = fetch(ref);
  if (ref->kept.defined()) return data.clone();
  // With several stages here a request of this rank to itself may want it too.
  if (ref->home_rank != options_.global_rank && options_.num_chunks == 1) {
    // The store's copy goes to the caller; who asks again gets a new one.
    store_.release(ref->ref, ref->mb);
    std::erase(ref->copies, options_.global_rank);
    return data;
  }
  return data.clone();
}

at::Tensor Server::make_handle(const RemoteRefPtr& ref) {
  if (!handle_factory_) return fetch_to_own(ref);
  at::Tensor handle = handle_factory_(ref->meta);
  attach_remote_ref(handle, ref);
  return handle;
}

// What outlives the body must not depend on the other ranks any more.
void Server::settle(Context& context) {
  context.caller.sent.clear();
  for (const auto& weak : std::exchange(context.caller.refs, {})) {
    const RemoteRefPtr ref = weak.lock();
    if (!ref || ref->kept.defined() || ref->is_local) continue;
    // Besides this one, and those that keep it for other ranks.
    if (ref.use_count() > 1 + ref->num_published) ref->kept = fetch_to_own(ref);
  }
}

void Server::await_requests(Context& context) {
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

// ----------------------------------------------- what bodies do as a group

void Server::publish_output(const std::string& structure,
                            const std::vector<at::Tensor>& tensors) {
  Context& context = calling_context("the model's output");
  Header header = header_of(Kind::kModelOutput, context.key.mb);
  header.index = context.num_model_calls++;
  ResultMeta result;
  result.structure = structure;
  std::vector<mailbox::MessageTensor> sent(tensors.size());
  std::string homes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    result.tensors.push_back(TensorMeta::of(tensors[i]));
    sent[i].requires_grad = tensors[i].requires_grad();
    RemoteRefPtr ref = remote_ref_of(tensors[i]);
    int32_t home = -1;
    const bool is_away = ref && !ref->kept.defined();
    if (!is_away && result.tensors[i].num_bytes() <= kEagerOutputBytes) {
      // A copy: the user's code may change outputs while they are on their way.
      sent[i].data = ref ? ref->kept : tensors[i].detach().clone();
    } else {
      if (!is_away) ref = store_output(context, tensors[i]);
      sent[i].ref = ref->ref;
      home = ref->home_rank;
      ++ref->num_published;
      std::lock_guard<std::mutex> lock(mutex_);
      published_[static_cast<int>(header.mb)].push_back(ref);
    }
    homes.append(reinterpret_cast<const char*>(&home), sizeof home);
  }
  for (const int rank : options_.pp_ranks) {
    if (rank == options_.global_rank) continue;
    post(rank, header, homes + result.encode(), sent);
  }
}

// A large output that was made here waits for ranks which want to see it.
RemoteRefPtr Server::store_output(Context& context, const at::Tensor& tensor) {
  auto ref = std::make_shared<RemoteRef>();
  ref->ref = {options_.global_rank, next_request_id_++ * kMaxResults};
  ref->home_rank = options_.global_rank;
  ref->mb = context.key.mb;
  ref->releases = releases_;
  store_.put(ref->ref, ref->mb, tensor.detach().clone());
  return ref;
}

mailbox::Message Server::await_notice(Kind kind, int64_t index,
                                      const char* waits_for) {
  Context& context = calling_context("following the driver");
  const SlotKey key{kind, context.key.mb, index};
  Slot* slot = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = &notices_[key];
  }
  mailbox::Message message = scheduler_.wait(*slot, waits_for, driver_rank());
  std::lock_guard<std::mutex> lock(mutex_);
  notices_.erase(key);
  return message;
}

ModelOutput Server::await_output() {
  Context& context = calling_context("following the driver");
  mailbox::Message message = await_notice(
      Kind::kModelOutput, context.num_model_calls++, "the model's output");
  const size_t homes_bytes = message.tensors.size() * sizeof(int32_t);
  const ResultMeta result =
      ResultMeta::decode(message.bytes.substr(homes_bytes));
  ModelOutput output;
  output.structure = result.structure;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    mailbox::MessageTensor& tensor = message.tensors[i];
    ModelOutput::Tensor& received = output.tensors.emplace_back();
    received.requires_grad = tensor.requires_grad;
    if (tensor.data.defined()) {
      received.data = to_device(std::move(tensor.data));
      continue;
    }
    int32_t home = -1;
    std::memcpy(&home, message.bytes.data() + i * sizeof home, sizeof home);
    received.ref = std::make_shared<RemoteRef>();
    received.ref->ref = tensor.ref;
    received.ref->home_rank = home;
    received.ref->mb = context.key.mb;
    received.ref->meta = result.tensors.at(i);
    context.caller.add_ref(received.ref);
  }
  return output;
}

void Server::begin_backward() {
  calling_context("backward");
  scheduler_.enter_phase(Phase::kBackward);
}

void Server::end_backward() {
  Context& context = calling_context("backward");
  Header header = header_of(Kind::kBackwardDone, context.key.mb);
  header.index = context.num_backward_calls++;
  post_to_others(header);
}

void Server::await_backward() {
  Context& context = calling_context("backward");
  await_notice(Kind::kBackwardDone, context.num_backward_calls++,
               "the driver's backward");
}

}  // namespace smp::pipeline
