#include "tests/cpp/pipeline/server_ranks.h"
#include "tests/cpp/shm/local_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cmath>
#include <utility>

#include "csrc/autograd/node.h"
#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

using torch::autograd::variable_list;

// Gradients come as handles; what the rank computes itself needs the data.
class LeaveNode : public torch::autograd::Node {
 public:
  LeaveNode(Server& server, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), server_(server) {}
  std::string name() const override { return "LeaveBackward"; }
  variable_list apply(variable_list&& grads) override {
    const RemoteRefPtr ref = remote_ref_of(grads[0]);
    if (!ref) return std::move(grads);
    return {server_.tensors().fetch_to_own(ref)};
  }

 private:
  Server& server_;
};

at::Tensor filled(int64_t rows, const std::function<double(int64_t)>& value) {
  at::Tensor tensor = at::empty({rows, kWidth}, at::kDouble);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data_ptr<double>()[i] = value(i);
  }
  return tensor;
}

// Makes handles of NaN: a value that is read by mistake shows in the loss.
std::vector<at::Tensor> make_handles(const std::vector<TensorMeta>& metas,
                                     c10::Device device) {
  std::vector<at::Tensor> handles;
  for (const TensorMeta& meta : metas) {
    const double hint = at::isFloatingType(meta.dtype) ? std::nan("") : 0;
    handles.push_back(
        at::full({}, hint, at::TensorOptions(meta.dtype).device(device))
            .expand(meta.sizes)
            .detach());
  }
  return handles;
}

}  // namespace

at::Tensor make_weight(int rank) {
  return filled(kWidth,
                [&](int64_t i) {
                  return 0.02 * (1 + rank) * ((i * 7 + rank) % 11 - 5);
                })
      .set_requires_grad(true);
}

at::Tensor make_input(int mb) {
  return filled(kRows, [&](int64_t i) { return 0.01 * (mb + 1) * (i % 17); });
}

at::Tensor compute(const at::Tensor& x, const at::Tensor& weight) {
  return at::tanh(at::mm(x, weight));
}

Ranks::Ranks(RankSettings the_settings) : settings(std::move(the_settings)) {
  for (int rank = 0; rank < settings.size; ++rank) {
    boards.push_back(std::make_shared<health::FaultBoard>(rank));
  }
  memories.resize(settings.size);
  if (settings.has_shared_memory) {
    memories = shm::make_local_shared_memory(settings.size, 50'000);
  }
}

void Ranks::tell_others(int rank, const std::string& where,
                        const std::string& what) {
  for (int other = 0; other < settings.size; ++other) {
    if (other == rank) continue;
    tell(other, {.kind = health::Fault::Kind::kRaised,
                 .global_rank = rank,
                 .where = where,
                 .text = what});
  }
}

void Ranks::tell(int rank, const health::Fault& fault) {
  boards.at(rank)->report(fault);
}

namespace {

lanes::LaneOptions lane_options(const RankSettings& settings,
                                c10::Device device) {
  lanes::LaneOptions options{.device = device};
  if (settings.lanes) options.source = lanes::fake_source(*settings.lanes);
  return options;
}

}  // namespace

Rank::Rank(Ranks& ranks, int the_rank, const comm::CommunicatorPtr& world)
    : rank(the_rank),
      w(make_weight(the_rank).detach().to(ranks.settings.device_of(the_rank))),
      ranks_(ranks) {
  w.set_requires_grad(true);
  fault_subscription_ =
      ranks_.boards[rank]->subscribe([this] { tell_own_fault(); });
  mailbox = std::make_shared<mailbox::Mailbox>(
      world, ranks.boards[rank], std::exchange(ranks.memories[rank], nullptr),
      lane_options(ranks.settings, device()));
  const RankSettings& settings = ranks.settings;
  Server::Options options;
  options.global_rank = rank;
  for (int r = 0; r < settings.size; ++r) options.pp_ranks.push_back(r);
  options.num_chunks = settings.num_chunks;
  options.policy = settings.policy;
  options.active_microbatches = settings.active_microbatches;
  options.device = device();
  options.timeout = std::chrono::seconds(20);
  options.hold_back_timeout = settings.hold_back_timeout;
  server = std::make_unique<Server>(options, mailbox, ranks.boards[rank]);
  std::vector<std::string> names;
  std::vector<int> chunk_idxs;
  for (int i = 0; i < settings.num_modules(); ++i) {
    names.push_back("stage" + std::to_string(i));
    chunk_idxs.push_back(i / settings.size);
  }
  server->add_modules(names, chunk_idxs);
  server->callee().set_forward_handler(
      [this](Call call) { return serve(std::move(call)); });
  server->set_error_reporter(
      [this](const std::string& where, const std::string& what) {
        errors.push_back(where + ": " + what);
        ranks_.tell_others(rank, where, what);
      });
  if (settings.has_handles) {
    server->tensors().set_handle_factory(
        [device = device()](const std::vector<TensorMeta>& metas) {
          return make_handles(metas, device);
        });
  }
}

Rank::~Rank() {
  server->close();
  mailbox->close();
  ranks_.boards[rank]->unsubscribe(fault_subscription_);
}

// Tells the other ranks what a thread of the mailbox has reported here; in
// processes the liveness channel does. Without it all would wait in silence.
void Rank::tell_own_fault() const {
  const auto fault = ranks_.boards[rank]->fault();
  if (fault && fault->is_raised_by(rank)) {
    ranks_.tell_others(rank, fault->where, fault->text);
  }
}

Call Rank::serve(Call call) {
  std::vector<at::Tensor> inputs;
  for (auto& tensor : call.tensors) inputs.push_back(std::move(tensor.data));
  call.tensors.clear();
  const auto found = modules.find(call.module_id);
  const auto outputs = found == modules.end()
                           ? std::vector{compute(inputs.at(0), w)}
                           : found->second(std::move(inputs));
  Call result;
  result.structure = "result";
  for (const at::Tensor& output : outputs) {
    result.tensors.emplace_back();
    result.tensors.back().data = output;
  }
  return result;
}

RemoteResult Rank::call(int module, const std::vector<at::Tensor>& inputs,
                        const std::string& structure) {
  return remote_call(server->caller(), module % size(), module, true, structure,
                     "mode", inputs);
}

at::Tensor Rank::call_one(int module, const at::Tensor& input) {
  return call(module, {input}).tensors.at(0);
}

at::Tensor Rank::leave(const at::Tensor& tensor) {
  at::Tensor left = tensor.detach();
  if (tensor.requires_grad() && at::GradMode::is_enabled()) {
    torch::autograd::create_gradient_edge(
        left, autograd::make_node<LeaveNode>(
                  *server, torch::autograd::collect_next_edges(tensor)));
  }
  return left;
}

at::Tensor Rank::arrive(const at::Tensor& handle) {
  return remote_ref_of(handle) ? materialize(server->tensors(), handle)
                               : handle;
}

void Rank::train_on(int mb, const at::Tensor& loss) {
  server->announcements().publish_output("loss", {loss});
  losses.at(mb) = loss.item<double>();
  server->steps().begin_backward();
  torch::autograd::backward({loss}, {});
  server->announcements().end_backward();
}

void Rank::follow(int mb) {
  const ModelOutput output = server->announcements().await_output();
  EXPECT_EQ(output.structure, "loss");
  losses.at(mb) = output.tensors.at(0).data.item<double>();
  server->announcements().await_backward();
}

void Rank::chain(int mb) {
  if (!server->is_driver()) return follow(mb);
  at::Tensor x = leave(compute(make_input(mb).to(device()), w));
  const int num_modules = ranks_.settings.num_modules();
  for (int i = 1; i < num_modules; ++i) x = call_one(i, x);
  train_on(mb, arrive(x).sum());
}

void Rank::step(int num_microbatches, const std::function<void(int)>& body) {
  losses.assign(num_microbatches, 0);
  ASSERT_EQ(server->steps().begin("train", num_microbatches).num_microbatches,
            num_microbatches);
  server->steps().run(num_microbatches, 1, body);
}

void Rank::expect_empty() const {
  EXPECT_EQ(server->num_records(), 0) << "rank " << rank;
  EXPECT_EQ(server->num_stored(), 0) << "rank " << rank;
  EXPECT_EQ(server->num_queued(), 0) << "rank " << rank;
}

void run_servers(const RankSettings& settings,
                 const std::function<void(Rank&, Ranks&)>& body,
                 std::chrono::milliseconds deadline) {
  Ranks ranks(settings);
  comm::run_ranks(
      settings.size,
      [&](int rank, const comm::CommunicatorPtr& world) {
        Rank self(ranks, rank, world);
        body(self, ranks);
      },
      deadline);
}

}  // namespace smp::pipeline
