#include "csrc/pipeline/tensor_directory.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

// Smaller tensors travel with each request: naming them costs more.
constexpr int64_t kInlineBytes = 1024;

bool holds(const RemoteRef& ref, int rank) {
  return ref.home_rank == rank ||
         std::find(ref.copies.begin(), ref.copies.end(), rank) !=
             ref.copies.end();
}

}  // namespace

TensorDirectory::TensorDirectory(c10::Device device, bool calls_itself,
                                 Messenger& messenger, Scheduler& scheduler)
    : device_(device),
      calls_itself_(calls_itself),
      messenger_(messenger),
      scheduler_(scheduler),
      releases_(std::make_shared<ReleaseList>()) {}

void TensorDirectory::set_handle_factory(HandleFactory factory) {
  handle_factory_ = std::move(factory);
}

// ------------------------------------------------------------------- names

mailbox::MessageTensor TensorDirectory::address_ref(Context& context, int dst,
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

mailbox::MessageTensor TensorDirectory::address(Context& context, int dst,
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
    ref->ref = {messenger_.global_rank(), next_id() * kMaxResults};
    ref->home_rank = messenger_.global_rank();
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

RemoteRefPtr TensorDirectory::name_result(Context& context,
                                          const Header& request, int owner,
                                          int idx, const TensorMeta& meta,
                                          const std::shared_ptr<Route>& route,
                                          const Route::Hops& hops) {
  auto ref = std::make_shared<RemoteRef>();
  ref->ref = {messenger_.global_rank(), request.request_id * kMaxResults + idx};
  ref->home_rank = owner;
  ref->mb = request.mb;
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

RemoteRefPtr TensorDirectory::keep(Context& context, const at::Tensor& tensor) {
  auto ref = std::make_shared<RemoteRef>();
  ref->ref = {messenger_.global_rank(), next_id() * kMaxResults};
  ref->home_rank = messenger_.global_rank();
  ref->mb = context.key.mb;
  ref->releases = releases_;
  store_.put(ref->ref, ref->mb,
             memory::MarkedTensor::of_current_stream(tensor.detach().clone()));
  return ref;
}

// Sorts refs that were released meanwhile by the ranks that hold their data.
void TensorDirectory::drain_releases(int64_t mb) {
  const int here = messenger_.global_rank();
  std::vector<mailbox::MessageTensor> own;
  for (ReleaseList::Released& released : releases_->take()) {
    for (const int holder : released.holders) {
      if (holder == here && calls_itself_) {
        own.emplace_back();
        own.back().ref = released.ref;
      } else if (holder == here) {
        store_.release(released.ref, mb);
      } else {
        to_release_[holder].push_back(released.ref);
      }
    }
  }
  // Releases must not overtake the requests that a rank with several stages
  // sends to itself.
  if (!own.empty()) {
    messenger_.post(here, messenger_.header_of(Kind::kRelease, mb), {},
                    std::move(own));
  }
}

std::vector<mailbox::Ref> TensorDirectory::take_released(int holder,
                                                         int64_t mb) {
  drain_releases(mb);
  return std::exchange(to_release_[holder], {});
}

// -------------------------------------------------------------------- data

void TensorDirectory::order_push(RemoteRef& ref, int dst) {
  ref.copies.push_back(dst);
  if (ref.route) ref.route->add(ref.result_idx, dst);
  Header header = messenger_.header_of(Kind::kPush, ref.mb);
  header.index = dst;
  std::vector<mailbox::MessageTensor> tensors(1);
  tensors[0].ref = ref.ref;
  messenger_.post(ref.home_rank, header, {}, std::move(tensors));
  ++num_pushes_;
}

at::Tensor TensorDirectory::use(memory::MarkedTensor tensor) const {
  at::Tensor data = std::move(tensor).use();
  if (!data.defined() || data.device() == device_) return data;
  return data.to(device_);
}

at::Tensor TensorDirectory::fetch(const RemoteRefPtr& ref) {
  if (ref->kept.defined()) return ref->kept;
  const int here = messenger_.global_rank();
  Context& context =
      calling_context("reading a result of a module on global_rank " +
                      std::to_string(ref->home_rank));
  context.awaits_gradients |= ref->is_gradient;
  if (!holds(*ref, here)) {
    order_push(*ref, here);
    ++num_fetches_;
  }
  std::erase(ref->foreseen, here);
  const auto slot = std::make_shared<Slot>();
  store_.when_available(ref->ref, ref->mb,
                        [this, slot](memory::MarkedTensor made) {
                          mailbox::Message message;
                          message.tensors.resize(1);
                          message.tensors[0].data = std::move(made.data);
                          message.tensors[0].mark = std::move(made.mark);
                          scheduler_.fill(*slot, std::move(message));
                        });
  mailbox::Message message =
      scheduler_.wait(*slot, "the data of a result", ref->home_rank);
  mailbox::MessageTensor& came = message.tensors[0];
  return use({std::move(came.data), std::move(came.mark)});
}

at::Tensor TensorDirectory::fetch_to_own(const RemoteRefPtr& ref) {
  at::Tensor data = fetch(ref);
  if (ref->kept.defined()) return data.clone();
  // With several stages here a request of this rank to itself may want it too.
  if (ref->home_rank != messenger_.global_rank() && !calls_itself_) {
    // The store's copy goes to the caller; code that asks again gets a new one.
    store_.release(ref->ref, ref->mb);
    std::erase(ref->copies, messenger_.global_rank());
    return data;
  }
  return data.clone();
}

std::vector<at::Tensor> TensorDirectory::make_handles(
    const std::vector<RemoteRefPtr>& refs) {
  std::vector<at::Tensor> handles(refs.size());
  std::vector<TensorMeta> metas;
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!refs[i]) continue;
    if (handle_factory_) {
      metas.push_back(refs[i]->meta);
    } else {
      handles[i] = fetch_to_own(refs[i]);
    }
  }
  if (metas.empty()) return handles;
  std::vector<at::Tensor> made = handle_factory_(metas);
  SMP_ASSERT(made.size() == metas.size(), "got ", made.size(), " handles for ",
             metas.size(), " refs");
  size_t next = 0;
  for (size_t i = 0; i < refs.size(); ++i) {
    if (!refs[i]) continue;
    handles[i] = std::move(made[next++]);
    attach_remote_ref(handles[i], refs[i]);
  }
  return handles;
}

void TensorDirectory::settle(Context& context) {
  context.caller.sent.clear();
  for (const auto& weak : std::exchange(context.caller.refs, {})) {
    const RemoteRefPtr ref = weak.lock();
    if (!ref || ref->kept.defined() || ref->is_local) continue;
    // There are owners besides this one and those that keep it for other ranks.
    if (ref.use_count() > 1 + ref->num_published) ref->kept = fetch_to_own(ref);
  }
}

// ---------------------------------------------- for requests of other ranks

void TensorDirectory::put(const mailbox::Ref& ref, int64_t mb,
                          memory::MarkedTensor tensor) {
  store_.put(ref, mb, std::move(tensor));
}

void TensorDirectory::when_available(const mailbox::Ref& ref, int64_t mb,
                                     TensorStore::Callback callback) {
  store_.when_available(ref, mb, std::move(callback));
}

void TensorDirectory::release(const mailbox::Ref& ref, int64_t mb) {
  store_.release(ref, mb);
}

void TensorDirectory::offer(const Header& request, int caller,
                            const std::vector<at::Tensor>& results,
                            const Route::Hops& hops) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const mailbox::Ref ref{
        caller, request.request_id * kMaxResults + static_cast<int64_t>(i)};
    // Pushes come before the data: data may be released as soon as they are
    // stored.
    for (const auto& [idx, rank] : hops) {
      if (idx == static_cast<int>(i)) push(ref, request.mb, rank);
    }
    store_.put(ref, request.mb,
               memory::MarkedTensor::of_current_stream(results[i]));
  }
}

void TensorDirectory::push(const mailbox::Ref& ref, int64_t mb, int dst) {
  store_.when_available(
      ref, mb, [this, ref, mb, dst](memory::MarkedTensor made) {
        // Later writes on the stream that made the data come after the sending.
        const c10::OptionalStreamGuard guard(made.stream);
        std::vector<mailbox::MessageTensor> tensors(1);
        tensors[0].ref = ref;
        tensors[0].data = std::move(made.data);
        tensors[0].mark = std::move(made.mark);
        messenger_.post(dst, messenger_.header_of(Kind::kData, mb), {},
                        std::move(tensors));
      });
}

void TensorDirectory::take(const Header& header, mailbox::Message&& message) {
  if (header.kind == Kind::kPush) {
    push(message.tensors.at(0).ref, header.mb, static_cast<int>(header.index));
  } else if (header.kind == Kind::kRelease) {
    for (const mailbox::MessageTensor& tensor : message.tensors) {
      store_.release(tensor.ref, header.mb);
    }
    // A release may come after the end of its microbatch.
    if (has_ended(header.mb)) store_.drop_microbatch(header.mb);
  } else if (!has_ended(header.mb)) {
    // Otherwise the data took the route of an earlier call, and are not needed.
    for (mailbox::MessageTensor& tensor : message.tensors) {
      store_.put(tensor.ref, header.mb,
                 {std::move(tensor.data), std::move(tensor.mark)});
    }
  }
}

// ------------------------------------------------------------------- steps

bool TensorDirectory::has_ended(int64_t mb) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_.count(mb) > 0;
}

void TensorDirectory::begin_step() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_.clear();
}

void TensorDirectory::end_microbatch(int mb) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_.insert(mb);
  }
  store_.drop_microbatch(mb);
}

void TensorDirectory::clear() {
  store_.clear();
  releases_->clear();
}

void TensorDirectory::close() {
  store_.clear();
  handle_factory_ = {};  // refers to the model, which refers to this
}

}  // namespace smp::pipeline
