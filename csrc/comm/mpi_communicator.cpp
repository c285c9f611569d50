#include "csrc/comm/mpi_communicator.h"

#include <ATen/ops/empty.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "csrc/comm/communicator_checks.h"
#include "csrc/comm/mpi_buffers.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kForever = std::chrono::hours(24 * 365);
// Time the processes of a new group wait for each other, also at the end.
constexpr milliseconds kMeetingTimeout = std::chrono::minutes(5);
// Time the end of MPI waits for messages whose Work was destroyed.
constexpr milliseconds kDrainTimeout = std::chrono::seconds(1);

void check_mpi(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(rank_prefix() + what + ": " + std::string(text, length));
}

// Polls `test` until it is true or `give_up` is, because MPI offers no wait
// that can be ended. Polls eagerly at first, for short messages, then with
// pauses.
bool poll(const std::function<bool()>& test,
          const std::function<bool()>& give_up) {
  constexpr int kEagerTests = 200;
  constexpr std::chrono::microseconds kLongestPause{200};
  std::chrono::microseconds pause{5};
  for (int i = 0; !test(); ++i) {
    if (give_up()) return false;
    if (i < kEagerTests) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  return true;
}

bool poll_request(MPI_Request& request, milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  return poll(
      [&] {
        int is_done = 0;
        check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
        return is_done != 0;
      },
      [&] { return Clock::now() >= deadline; });
}

// A request whose Work is destroyed, and the tensors that MPI still uses.
struct Leftover {
  MPI_Request request;
  std::vector<at::Tensor> tensors;
};

// The MPI of this process. It is never destroyed, because the program may end
// without finalising MPI.
struct Runtime {
  std::mutex mutex;
  bool started_by_us = false;
  bool finalized = false;
  std::vector<Leftover> leftovers;
  std::atomic<bool> has_leftovers = false;
  std::atomic<bool> aborted = false;

  static Runtime& get() {
    static auto* runtime = new Runtime;
    return *runtime;
  }

  void start() {
    std::lock_guard lock(mutex);
    SMP_CHECK(!finalized,
              "MPI was finalized and cannot be started again in one process; "
              "call mpi_finalize only at the end of the program");
    int is_initialized = 0;
    MPI_Initialized(&is_initialized);
    int level = MPI_THREAD_SINGLE;
    if (is_initialized != 0) {
      check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    } else {
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
                "MPI_Init_thread");
      started_by_us = true;
    }
    SMP_CHECK(level >= MPI_THREAD_MULTIPLE,
              "MPI must let several threads call it (MPI_THREAD_MULTIPLE, ",
              MPI_THREAD_MULTIPLE, "), got level ", level,
              is_initialized != 0
                  ? "; the program started MPI before smp: start it with "
                    "MPI_Init_thread(MPI_THREAD_MULTIPLE) or leave it to smp"
                  : "; use an MPI that is built with thread support");
  }

  void keep(Leftover leftover) {
    std::lock_guard lock(mutex);
    leftovers.push_back(std::move(leftover));
    has_leftovers = true;
  }

  // Frees requests that are finished by now.
  void sweep() {
    if (!has_leftovers) return;
    std::lock_guard lock(mutex);
    std::erase_if(leftovers, [](Leftover& one) {
      int is_done = 0;
      MPI_Test(&one.request, &is_done, MPI_STATUS_IGNORE);
      return is_done != 0;
    });
    has_leftovers = !leftovers.empty();
  }
};

struct Shared {
  MPI_Comm comm =
      MPI_COMM_NULL;  // freed by MPI_Finalize: freeing is collective
  GroupInfo info;
  std::mutex issue_mutex;  // collectives in one order
  std::atomic<bool> aborted = false;
};

using SharedPtr = std::shared_ptr<Shared>;

// The kind of a request, by which it is given up.
enum class Kind { kReceive, kOther };

class MpiWork final : public Work {
 public:
  /// @param tensors  kept until MPI is done; the first is that of a receive
  /// @param finish  run once when the request has succeeded; may be empty
  MpiWork(SharedPtr shared, CallName call, Kind kind,
          std::vector<at::Tensor> tensors, MPI_Request request,
          std::function<void()> finish)
      : shared_(std::move(shared)),
        call_(std::move(call)),
        kind_(kind),
        tensors_(std::move(tensors)),
        finish_(std::move(finish)),
        request_(request) {}

  ~MpiWork() override {
    if (is_done_ || Runtime::get().finalized) return;
    if (kind_ == Kind::kReceive) {
      MPI_Cancel(&request_);
    }
    Runtime::get().keep({request_, std::move(tensors_)});
  }

  bool done() override {
    std::lock_guard lock(mutex_);
    return gave_up() || test();
  }

  void wait(milliseconds timeout) override {
    const Clock::time_point deadline =
        Clock::now() + std::min(timeout, kForever);
    poll(
        [&] {
          std::lock_guard lock(mutex_);
          return test();
        },
        [&] { return gave_up() || Clock::now() >= deadline; });
    std::lock_guard lock(mutex_);
    SMP_CHECK(is_done_ || !gave_up(), call_.text(), ": aborted");
    SMP_CHECK(is_done_, call_.text(), ": timed out after ", timeout.count(),
              " ms");
    SMP_CHECK(error_.empty(), call_.text(), ": ", error_);
  }

  void abort() override { aborted_ = true; }

 private:
  bool gave_up() const { return aborted_ || shared_->aborted; }

  // Tests the request; called with the lock held.
  bool test() {
    if (is_done_) return true;
    int flag = 0;
    MPI_Status status;
    const int code = MPI_Test(&request_, &flag, &status);
    if (code == MPI_SUCCESS && flag == 0) return false;
    is_done_ = true;
    if (code != MPI_SUCCESS) {
      char text[MPI_MAX_ERROR_STRING];
      int length = 0;
      MPI_Error_string(code, text, &length);
      error_.assign(text, length);
      return true;
    }
    if (kind_ == Kind::kReceive) check_received(status);
    if (finish_ && error_.empty()) finish_();
    return true;
  }

  void check_received(MPI_Status& status) {
    int num_bytes = 0;
    MPI_Get_count(&status, MPI_UINT8_T, &num_bytes);
    const auto expected = static_cast<int64_t>(tensors_[0].nbytes());
    // Counts above 2 GB do not fit; MPI itself reports longer messages.
    if (num_bytes == MPI_UNDEFINED || num_bytes == expected) return;
    error_ = detail::concat("group rank ", status.MPI_SOURCE, " sent ",
                            num_bytes, " bytes, expected ", expected, " for ",
                            describe_tensor(tensors_[0]));
  }

  const SharedPtr shared_;
  const CallName call_;
  const Kind kind_;
  std::vector<at::Tensor> tensors_;
  const std::function<void()> finish_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;  // MPI forbids two tests of one request at a time
  MPI_Request request_;
  bool is_done_ = false;
  std::string error_;
};

// Returns [2, n]: counts, and the offset of each. Both are in units, of which
// an element has `units`; their sum fits.
at::Tensor counts_for_mpi(const Counts& counts, int64_t units) {
  const auto n = static_cast<int64_t>(counts.size());
  at::Tensor result = at::empty({2, n}, at::kInt);
  auto* numbers = result.mutable_data_ptr<int>();
  int64_t begin = 0;
  for (int64_t i = 0; i < n; ++i) {
    numbers[i] = static_cast<int>(counts[i] * units);
    numbers[n + i] = static_cast<int>(begin);
    begin += counts[i] * units;
  }
  return result;
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::string name)
      : shared_(std::make_shared<Shared>()) {
    shared_->comm = comm;
    int group_rank = 0;
    int size = 0;
    check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN),
              "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(comm, &group_rank), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    shared_->info = {std::move(name), group_rank, size};
    info_ = std::shared_ptr<const GroupInfo>(shared_, &shared_->info);
  }

  int group_rank() const override { return info_->group_rank; }
  int size() const override { return info_->size; }
  const std::string& name() const override { return info_->name; }

  WorkPtr send(const at::Tensor& tensor, int dst, int tag) override {
    CallName call{info_, "send", "dst", dst, tag};
    check_peer(call);
    check_message(tensor, call);
    const Buffer buffer = buffer_to_move(tensor, call);
    return start(call, Kind::kOther, {tensor}, [&](MPI_Request* request) {
      return MPI_Isend(buffer.data, buffer.count, buffer.type, dst, tag,
                       shared_->comm, request);
    });
  }

  WorkPtr recv(at::Tensor tensor, int src, int tag) override {
    CallName call{info_, "recv", "src", src, tag};
    check_peer(call);
    check_message(tensor, call);
    const Buffer buffer = buffer_to_move(tensor, call);
    return start(call, Kind::kReceive, {tensor}, [&](MPI_Request* request) {
      return MPI_Irecv(buffer.data, buffer.count, buffer.type, src, tag,
                       shared_->comm, request);
    });
  }

  WorkPtr all_reduce(at::Tensor tensor, ReduceOp op) override {
    CallName call{info_, "all_reduce"};
    check_reducible(tensor, call);
    check_cpu_tensor(tensor, call);
    at::Tensor wide = tensor;
    std::function<void()> finish;
    if (is_half(tensor)) {
      wide = tensor.detach().to(at::kFloat);
      finish = [tensor = tensor.detach(), wide] { tensor.copy_(wide); };
    }
    const Buffer buffer = buffer_to_reduce(wide, call);
    return start(
        call, Kind::kOther, {tensor, wide},
        [&](MPI_Request* request) {
          return MPI_Iallreduce(MPI_IN_PLACE, buffer.data, buffer.count,
                                buffer.type, to_mpi(op), shared_->comm,
                                request);
        },
        std::move(finish));
  }

  WorkPtr broadcast(at::Tensor tensor, int root) override {
    CallName call{info_, "broadcast", "root", root};
    check_root(call);
    check_cpu_tensor(tensor, call);
    const Buffer buffer = buffer_to_move(tensor, call);
    return start(call, Kind::kOther, {tensor}, [&](MPI_Request* request) {
      return MPI_Ibcast(buffer.data, buffer.count, buffer.type, root,
                        shared_->comm, request);
    });
  }

  WorkPtr all_gather(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_gather"};
    check_parts(output, input, call);
    check_cpu_tensor(input, call);
    const Buffer from = buffer_to_move(input, call);
    return start(call, Kind::kOther, {output, input},
                 [&](MPI_Request* request) {
                   return MPI_Iallgather(from.data, from.count, from.type,
                                         output.data_ptr(), from.count,
                                         from.type, shared_->comm, request);
                 });
  }

  WorkPtr reduce_scatter(at::Tensor output, const at::Tensor& input,
                         ReduceOp op) override {
    CallName call{info_, "reduce_scatter"};
    check_reducible(input, call);
    check_parts(input, output, call);
    check_cpu_tensor(input, call);
    at::Tensor from = input;
    at::Tensor to = output;
    std::function<void()> finish;
    if (is_half(input)) {
      from = input.detach().to(at::kFloat);
      to = output.detach().to(at::kFloat);
      finish = [output = output.detach(), to] { output.copy_(to); };
    }
    const Buffer buffer = buffer_to_reduce(to, call);
    return start(
        call, Kind::kOther, {output, input, to, from},
        [&](MPI_Request* request) {
          return MPI_Ireduce_scatter_block(from.data_ptr(), buffer.data,
                                           buffer.count, buffer.type,
                                           to_mpi(op), shared_->comm, request);
        },
        std::move(finish));
  }

  WorkPtr all_to_all(at::Tensor output, const at::Tensor& input) override {
    CallName call{info_, "all_to_all"};
    check_exchange(output, input, call);
    check_cpu_tensor(input, call);
    const Buffer from = buffer_to_move(input, call);
    const int count = from.count / size();
    return start(
        call, Kind::kOther, {output, input}, [&](MPI_Request* request) {
          return MPI_Ialltoall(from.data, count, from.type, output.data_ptr(),
                               count, from.type, shared_->comm, request);
        });
  }

  WorkPtr all_to_all_v(at::Tensor output, const at::Tensor& input,
                       const Counts& output_counts,
                       const Counts& input_counts) override {
    CallName call{info_, "all_to_all_v"};
    check_counts(output, input, output_counts, input_counts, call);
    check_cpu_tensor(input, call);
    const Buffer from = buffer_to_move(input, call);
    const Buffer to = buffer_to_move(output, call);
    const int64_t units = input.numel() > 0    ? from.count / input.numel()
                          : output.numel() > 0 ? to.count / output.numel()
                                               : 1;
    // The counts live until the request ends, because MPI reads them until
    // then.
    const at::Tensor send = counts_for_mpi(input_counts, units);
    const at::Tensor receive = counts_for_mpi(output_counts, units);
    const auto* sent = send.const_data_ptr<int>();
    const auto* received = receive.const_data_ptr<int>();
    return start(call, Kind::kOther, {output, input, send, receive},
                 [&, n = size()](MPI_Request* request) {
                   return MPI_Ialltoallv(from.data, sent, sent + n, from.type,
                                         to.data, received, received + n,
                                         to.type, shared_->comm, request);
                 });
  }

  WorkPtr barrier() override {
    CallName call{info_, "barrier"};
    return start(call, Kind::kOther, {}, [&](MPI_Request* request) {
      return MPI_Ibarrier(shared_->comm, request);
    });
  }

  void abort() override {
    shared_->aborted = true;
    Runtime::get().aborted = true;
  }

 private:
  static void check_message(const at::Tensor& tensor, const CallName& call) {
    check_cpu_tensor(tensor, call);
    void* largest = nullptr;
    int is_set = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &is_set);
    SMP_CHECK(is_set == 0 || call.tag <= *static_cast<int*>(largest),
              call.text(), ": this MPI has tags up to ",
              *static_cast<int*>(largest));
  }

  WorkPtr start(const CallName& call, Kind kind,
                std::vector<at::Tensor> tensors,
                const std::function<int(MPI_Request*)>& issue,
                std::function<void()> finish = {}) {
    SMP_CHECK(!shared_->aborted, call.text(), ": aborted");
    Runtime::get().sweep();
    MPI_Request request = MPI_REQUEST_NULL;
    {
      std::lock_guard lock(shared_->issue_mutex);
      const int code = issue(&request);
      if (code != MPI_SUCCESS) check_mpi(code, call.text());
    }
    return std::make_shared<MpiWork>(shared_, call, kind, std::move(tensors),
                                     request, std::move(finish));
  }

  SharedPtr shared_;
  std::shared_ptr<const GroupInfo> info_;
};

void check_group(const std::vector<int>& global_ranks) {
  int world_size = 0;
  int global_rank = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world_size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &global_rank), "MPI_Comm_rank");
  const std::set<int> distinct(global_ranks.begin(), global_ranks.end());
  SMP_CHECK_VALUE(!distinct.empty() && distinct.size() == global_ranks.size() &&
                      *distinct.begin() >= 0 && *distinct.rbegin() < world_size,
                  "make_mpi_group: expected different ranks in [0, ",
                  world_size, "), got ",
                  at::IntArrayRef(std::vector<int64_t>(global_ranks.begin(),
                                                       global_ranks.end())));
  SMP_CHECK_VALUE(distinct.contains(global_rank),
                  "make_mpi_group: global rank ", global_rank,
                  " is not in the list; only members call it");
}

// Returns when all members are here. Creating a group blocks without an end if
// a member never comes, so they meet before.
void meet(const std::vector<int>& global_ranks, int global_rank) {
  constexpr int kTag = 32001;
  const auto exchange = [&](bool sends, int peer) {
    MPI_Request request = MPI_REQUEST_NULL;
    char byte = 0;
    check_mpi(sends ? MPI_Isend(&byte, 1, MPI_CHAR, peer, kTag, MPI_COMM_WORLD,
                                &request)
                    : MPI_Irecv(&byte, 1, MPI_CHAR, peer, kTag, MPI_COMM_WORLD,
                                &request),
              "make_mpi_group");
    if (poll_request(request, kMeetingTimeout)) return;
    if (!sends) MPI_Cancel(&request);
    poll_request(request, kDrainTimeout);
    SMP_CHECK(false, "make_mpi_group: global rank ", peer,
              " did not come within ", kMeetingTimeout.count(), " ms");
  };
  const int first = global_ranks.front();
  if (global_rank != first) {
    exchange(true, first);
    exchange(false, first);
    return;
  }
  for (const bool sends : {false, true}) {
    for (const int peer : global_ranks) {
      if (peer != first) exchange(sends, peer);
    }
  }
}

}  // namespace

bool mpi_available() { return true; }

CommunicatorPtr make_mpi_world() {
  Runtime::get().start();
  // MPI writes the handle while the duplicate is made, so it must not be a
  // local.
  auto comm = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, comm.get(), &request),
            "make_mpi_world");
  if (!poll_request(request, kMeetingTimeout)) {
    comm.release();  // NOLINT: MPI may write to it later
    SMP_CHECK(false, "make_mpi_world: not all processes came within ",
              kMeetingTimeout.count(), " ms");
  }
  return std::make_shared<MpiCommunicator>(*comm, "mpi:world");
}

CommunicatorPtr make_mpi_group(const std::vector<int>& global_ranks) {
  Runtime::get().start();
  check_group(global_ranks);
  int global_rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &global_rank), "MPI_Comm_rank");
  meet(global_ranks, global_rank);

  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(world, static_cast<int>(global_ranks.size()),
                           global_ranks.data(), &group),
            "MPI_Group_incl");
  constexpr int kTag = 0;
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, group, kTag, &comm),
            "MPI_Comm_create_group");
  MPI_Group_free(&group);
  MPI_Group_free(&world);

  std::string name = "mpi";
  for (const int member : global_ranks) {
    name += (name == "mpi" ? ":" : ",") + std::to_string(member);
  }
  return std::make_shared<MpiCommunicator>(comm, std::move(name));
}

void mpi_finalize() {
  Runtime& runtime = Runtime::get();
  {
    std::lock_guard lock(runtime.mutex);
    if (!runtime.started_by_us || runtime.finalized || runtime.aborted) return;
  }
  const Clock::time_point deadline = Clock::now() + kDrainTimeout;
  poll(
      [&] {
        runtime.sweep();
        return !runtime.has_leftovers;
      },
      [&] { return Clock::now() >= deadline; });
  // MPI_Finalize blocks without an end if a process never calls it.
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &request), "mpi_finalize");
  SMP_CHECK(poll_request(request, kMeetingTimeout),
            "mpi_finalize: not all processes came within ",
            kMeetingTimeout.count(), " ms");
  std::lock_guard lock(runtime.mutex);
  runtime.finalized = true;
  check_mpi(MPI_Finalize(), "MPI_Finalize");
}

}  // namespace smp::comm
