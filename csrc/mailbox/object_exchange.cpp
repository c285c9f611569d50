#include "csrc/mailbox/object_exchange.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "csrc/common/check.h"

namespace smp::mailbox {
namespace {

// Values of fields[0] of a message, which define its other fields.
enum ObjectKind : int64_t {
  kObject = 1,  // fields: id
  kTaken,       // fields: id; the receiver has called recv
  kAllGather,   // fields: hash of the ranks, number of the collective, whose
               // part it is, number of ranks to relay it to, which are in front
               // of the bytes
  kBarrier,  // the same
};

// Largest inline string; longer ones are tensors, which the mailbox does not
// copy.
constexpr size_t kMaxInlineBytes = 8 * 1024;
// The field that says whether the bytes are the first tensor.
constexpr int kBytesAreTensor = 9;
// Most ranks that get a part directly; more get it by relays.
constexpr size_t kMaxDirect = 8;

// The payload of a message; several messages may share it.
class Payload {
 public:
  explicit Payload(std::string bytes, std::vector<at::Tensor> tensors = {})
      : tensors_(std::move(tensors)) {
    if (bytes.size() <= kMaxInlineBytes) {
      bytes_ = std::move(bytes);
      return;
    }
    auto kept = std::make_shared<std::string>(std::move(bytes));
    large_bytes_ = at::from_blob(
        kept->data(), {static_cast<int64_t>(kept->size())}, [kept](void*) {},
        at::TensorOptions(at::kByte));
  }

  void write_to(Message& message) const {
    message.bytes = bytes_;
    message.fields[kBytesAreTensor] = large_bytes_.defined() ? 1 : 0;
    if (large_bytes_.defined()) {
      message.tensors.push_back({.data = large_bytes_, .is_stable = true});
    }
    for (const at::Tensor& tensor : tensors_) {
      message.tensors.push_back({.data = tensor, .is_stable = true});
    }
  }

 private:
  std::string bytes_;
  at::Tensor large_bytes_;
  std::vector<at::Tensor> tensors_;
};

// Removes and returns the ranks before a message's bytes.
std::vector<int> take_relays(Message& message) {
  const int64_t count = message.fields[4];
  const auto num_bytes = static_cast<uint64_t>(count) * sizeof(int32_t);
  SMP_CHECK(count >= 0 && num_bytes <= message.bytes.size(),
            "an object message from global_rank ", message.source_rank,
            " names ", count, " ranks and has ", message.bytes.size(),
            " bytes");
  std::vector<int32_t> ranks(static_cast<size_t>(count));
  if (count > 0) std::memcpy(ranks.data(), message.bytes.data(), num_bytes);
  message.bytes.erase(0, num_bytes);
  return {ranks.begin(), ranks.end()};
}

void put_relays(Message& message, const std::vector<int>& ranks) {
  const std::vector<int32_t> numbers(ranks.begin(), ranks.end());
  message.fields[4] = static_cast<int64_t>(numbers.size());
  message.bytes.insert(0, reinterpret_cast<const char*>(numbers.data()),
                       numbers.size() * sizeof(int32_t));
}

std::string bytes_of(Message& message) {
  if (message.fields[kBytesAreTensor] == 0) return std::move(message.bytes);
  SMP_CHECK(!message.tensors.empty(), "an object message from global_rank ",
            message.source_rank, " has no bytes");
  const at::Tensor& data = message.tensors.front().data;
  return {static_cast<const char*>(data.const_data_ptr()), data.nbytes()};
}

Object object_of(Message&& message) {
  Object object{.bytes = bytes_of(message), .tensors = {}};
  for (size_t idx = message.fields[kBytesAreTensor] == 0 ? 0 : 1;
       idx < message.tensors.size(); ++idx) {
    object.tensors.push_back(std::move(message.tensors[idx].data));
  }
  return object;
}

Message make_message(ObjectKind kind, int64_t a, int64_t b = 0) {
  Message message;
  message.channel = Channel::kObject;
  message.fields = {kind, a, b};
  return message;
}

// Returns the FNV-1a hash of the sorted ranks.
int64_t hash_of(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  uint64_t hash = 0xcbf29ce484222325;
  for (const int rank : ranks) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash ^= (static_cast<uint32_t>(rank) >> shift) & 0xff;
      hash *= 0x100000001b3;
    }
  }
  return static_cast<int64_t>(hash);
}

std::string rank_text(int rank) { return std::to_string(rank); }

}  // namespace

ObjectExchange::ObjectExchange(std::shared_ptr<Mailbox> mailbox,
                               std::shared_ptr<health::FaultBoard> faults,
                               std::chrono::milliseconds timeout)
    : mailbox_(std::move(mailbox)),
      faults_(std::move(faults)),
      self_(mailbox_->global_rank()),
      timeout_(timeout) {
  subscription_ = faults_->subscribe([this] {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  });
  mailbox_->set_handler(Channel::kObject, [this](Message&& message) {
    on_message(std::move(message));
  });
}

ObjectExchange::~ObjectExchange() {
  mailbox_->set_handler(Channel::kObject, {});
  faults_->unsubscribe(subscription_);
}

void ObjectExchange::set_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

health::WaitSpec ObjectExchange::spec(std::string what, std::string hint) {
  std::lock_guard lock(mutex_);
  return {
      .what = std::move(what), .timeout = timeout_, .hint = std::move(hint)};
}

void ObjectExchange::check_rank(int global_rank, const char* what) const {
  SMP_CHECK_VALUE(global_rank >= 0 && global_rank < mailbox_->world_size(),
                  what, ": global_rank ", global_rank,
                  " does not exist, ranks are 0 to ",
                  mailbox_->world_size() - 1);
}

void ObjectExchange::on_message(Message&& message) {
  const int64_t kind_of_all = message.fields[0];
  if (kind_of_all == kAllGather || kind_of_all == kBarrier) {
    // Relayed first, so that the part is already on its way to others when the
    // collective returns here.
    const std::vector<int> relays = take_relays(message);
    relay(message, relays);
  }
  {
    std::lock_guard lock(mutex_);
    const int source = message.source_rank;
    const auto [kind, first, second] =
        std::tuple(message.fields[0], message.fields[1], message.fields[2]);
    switch (kind) {
      case kObject:
        objects_[source].push_back(std::move(message));
        break;
      case kTaken: {
        const auto found = unacknowledged_.find(first);
        // If missing, the sender has given up in the meantime.
        if (found != unacknowledged_.end()) found->second.erase(source);
        break;
      }
      case kAllGather:
      case kBarrier:
        gathers_[{first, second}].insert_or_assign(
            static_cast<int>(message.fields[3]),
            Part{kind, std::move(message)});
        break;
      default:
        SMP_CHECK(false, "object message of unknown kind ", kind,
                  " from global_rank ", source);
    }
  }
  changed_.notify_all();
}

// ---------------------------------------------------------- point to point

void ObjectExchange::send(int dst, Object object) {
  check_rank(dst, "send");
  post_object({dst}, std::move(object), "send(" + rank_text(dst) + ")");
}

void ObjectExchange::broadcast(const std::vector<int>& ranks, Object object) {
  std::vector<int> others;
  for (const int rank : ranks) {
    check_rank(rank, "broadcast");
    if (rank != self_) others.push_back(rank);
  }
  if (others.empty()) return;
  post_object(others, std::move(object), "broadcast");
}

void ObjectExchange::post_object(const std::vector<int>& ranks, Object object,
                                 const std::string& what) {
  const Payload payload(std::move(object.bytes), std::move(object.tensors));
  std::set<int> others(ranks.begin(), ranks.end());
  int64_t id = 0;
  {
    std::lock_guard lock(mutex_);
    id = next_object_id_++;
    if (others.erase(self_) > 0) {
      Message own = make_message(kObject, id);
      payload.write_to(own);
      for (MessageTensor& tensor : own.tensors) {
        tensor.data = tensor.data.clone();
      }
      own.source_rank = self_;
      objects_[self_].push_back(std::move(own));
      changed_.notify_all();
    }
    if (others.empty()) return;
    unacknowledged_[id] = others;
  }
  for (const int rank : others) {
    Message message = make_message(kObject, id);
    payload.write_to(message);
    mailbox_->post(rank, std::move(message));
  }
  health::WaitSpec wait_spec = spec(
      what, "every receiver has to call recv_from with this rank as source");
  wait_spec.missing = [this, id] {
    const std::set<int>& missing = unacknowledged_.at(id);
    return std::vector<int>(missing.begin(), missing.end());
  };
  health::FaultAwareWait wait(*faults_, std::move(wait_spec));
  std::unique_lock lock(mutex_);
  try {
    wait.until(lock, changed_, [&] { return unacknowledged_.at(id).empty(); });
  } catch (...) {
    unacknowledged_.erase(id);
    throw;
  }
  unacknowledged_.erase(id);
}

Object ObjectExchange::recv(int src) {
  check_rank(src, "recv_from");
  health::WaitSpec wait_spec =
      spec("recv_from(" + rank_text(src) + ")",
           "global_rank " + rank_text(src) +
               " has to call send or broadcast with this rank as receiver");
  wait_spec.missing = [src] { return std::vector<int>{src}; };
  health::FaultAwareWait wait(*faults_, std::move(wait_spec));
  Message message;
  {
    std::unique_lock lock(mutex_);
    std::deque<Message>& queue = objects_[src];
    wait.until(lock, changed_, [&] { return !queue.empty(); });
    message = std::move(queue.front());
    queue.pop_front();
  }
  if (src != self_)
    mailbox_->post(src, make_message(kTaken, message.fields[1]));
  return object_of(std::move(message));
}

// -------------------------------------------------------------- collectives

// Sends a part on to all ranks of a list: to the first, second, fourth and so
// on, each with the ranks to which it relays the part. This rank need not have
// called the collective yet. Lists begin after the rank that the part is of, so
// every rank sends to ranks a power of two further on.
void ObjectExchange::relay(const Message& part, const std::vector<int>& ranks) {
  const size_t size = ranks.size();
  for (size_t place = 1; place <= size; place *= 2) {
    std::vector<int> below;
    for (size_t at = 3 * place; at <= size; at += 2 * place) {
      below.push_back(ranks[at - 1]);
    }
    Message message = part;
    for (MessageTensor& tensor : message.tensors) tensor.is_stable = true;
    put_relays(message, below);
    mailbox_->post(ranks[place - 1], std::move(message));
  }
}

std::vector<std::string> ObjectExchange::all_gather(
    const std::vector<int>& ranks, std::string bytes, const std::string& what) {
  return gather(ranks, std::move(bytes), kAllGather, what);
}

void ObjectExchange::barrier(const std::vector<int>& ranks,
                             const std::string& what) {
  gather(ranks, {}, kBarrier, what);
}

std::vector<std::string> ObjectExchange::gather(const std::vector<int>& ranks,
                                                std::string bytes, int64_t kind,
                                                const std::string& what) {
  for (const int rank : ranks) check_rank(rank, what.c_str());
  std::set<int> others(ranks.begin(), ranks.end());
  SMP_CHECK_VALUE(others.size() == ranks.size(), what,
                  ": a rank is listed twice in", health::list_ranks(ranks));
  SMP_CHECK_VALUE(others.erase(self_) > 0, what, ": this rank (", self_,
                  ") is not one of", health::list_ranks(ranks));
  if (others.empty()) return {std::move(bytes)};

  GatherKey key;
  {
    std::lock_guard lock(mutex_);
    key.first = hash_of(ranks);
    key.second = next_gather_[key.first]++;
  }
  {
    Message part =
        make_message(static_cast<ObjectKind>(kind), key.first, key.second);
    part.fields[3] = self_;
    Payload(bytes).write_to(part);
    if (others.size() <= kMaxDirect) {
      for (const int rank : others) relay(part, {rank});
    } else {
      std::vector<int> after(ranks);
      const auto self = std::find(after.begin(), after.end(), self_);
      std::rotate(after.begin(), self, after.end());
      after.erase(after.begin());
      relay(part, after);
    }
  }
  health::WaitSpec wait_spec =
      spec(what + " over global_ranks" + health::list_ranks(ranks),
           "all of these ranks have to call it, in the same order");
  wait_spec.missing = [this, key, &others] {
    std::vector<int> missing;
    for (const int rank : others) {
      if (!gathers_[key].contains(rank)) missing.push_back(rank);
    }
    return missing;
  };
  health::FaultAwareWait wait(*faults_, std::move(wait_spec));
  Parts parts;
  {
    std::unique_lock lock(mutex_);
    wait.until(lock, changed_, [&] {
      const Parts& arrived = gathers_[key];
      check_parts(arrived, kind, what);
      return arrived.size() == others.size();
    });
    parts = std::move(gathers_.extract(key).mapped());
  }
  std::vector<std::string> result;
  result.reserve(ranks.size());
  for (const int rank : ranks) {
    result.push_back(rank == self_ ? std::move(bytes)
                                   : bytes_of(parts.at(rank).message));
  }
  return result;
}

void ObjectExchange::check_parts(const Parts& parts, int64_t kind,
                                 const std::string& what) const {
  for (const auto& [rank, part] : parts) {
    SMP_CHECK(part.kind == kind, "this rank is in ", what, ", but global_rank ",
              rank, " is in ",
              part.kind == kBarrier ? "a barrier" : "an all_gather",
              " of the same ranks; all ranks have to make the same calls in "
              "the same order");
  }
}

}  // namespace smp::mailbox
