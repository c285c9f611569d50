#include "tests/cpp/comm/communicator_suite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/cpp/comm/uneven_parts.h"

// The file does not use the library's own check macros, so that it can be
// linked into any program.
namespace smp::comm::suite {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
constexpr milliseconds kLong = std::chrono::seconds(120);

template <typename... Parts>
void expect(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream out;
  (out << ... << parts);
  throw std::runtime_error(out.str());
}

void expect_all(const at::Tensor& tensor, double value, const char* what) {
  const at::Tensor as_double = tensor.to(at::kDouble);
  expect(as_double.eq(value).all().item<bool>(), what, ": expected all ", value,
         ", got ", as_double);
}

// The text of the exception that `call` must throw.
std::string text_of_error(const char* what, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw std::runtime_error(std::string(what) + ": expected an error, got none");
}

void expect_text(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos, "expected '", part,
         "' in: ", text);
}

int next(const Communicator& comm) {
  return (comm.group_rank() + 1) % comm.size();
}

int previous(const Communicator& comm) {
  return (comm.group_rank() + comm.size() - 1) % comm.size();
}

at::Tensor filled(double value, at::ScalarType dtype = at::kFloat,
                  int64_t numel = 5) {
  return at::full({numel}, value, at::TensorOptions(dtype));
}

void check_identity(Communicator& comm) {
  expect(!comm.name().empty(), "no name");
  expect(comm.group_rank() >= 0 && comm.group_rank() < comm.size(),
         "group rank ", comm.group_rank(), " of ", comm.size());
}

void check_ring_all_dtypes(Communicator& comm) {
  if (comm.size() == 1) return;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
        at::kByte, at::kBool}) {
    const auto value = [&](int group_rank) {
      return dtype == at::kBool ? group_rank % 2 : group_rank + 3;
    };
    const at::Tensor mine = filled(value(comm.group_rank()), dtype);
    at::Tensor theirs = at::zeros({5}, at::TensorOptions(dtype));
    const WorkPtr send = comm.send(mine, next(comm), 1);
    const WorkPtr recv = comm.recv(theirs, previous(comm), 1);
    recv->wait(kLong);
    send->wait(kLong);
    expect_all(theirs, value(previous(comm)), "ring");
  }
}

void check_one_tag_keeps_order(Communicator& comm) {
  if (comm.size() == 1) return;
  constexpr int kCount = 30;
  std::vector<WorkPtr> sends;
  for (int i = 0; i < kCount; ++i) {
    sends.push_back(comm.send(filled(i), next(comm), 2));
  }
  for (int i = 0; i < kCount; ++i) {
    const at::Tensor got = at::zeros({5});
    comm.recv(got, previous(comm), 2)->wait(kLong);
    expect_all(got, i, "order");
  }
  for (const WorkPtr& send : sends) send->wait(kLong);
}

void check_tags_are_apart(Communicator& comm) {
  if (comm.size() == 1) return;
  const WorkPtr first = comm.send(filled(1), next(comm), 3);
  const WorkPtr second = comm.send(filled(2), next(comm), 4);
  const at::Tensor got_second = at::zeros({5});
  const at::Tensor got_first = at::zeros({5});
  comm.recv(got_second, previous(comm), 4)->wait(kLong);
  comm.recv(got_first, previous(comm), 3)->wait(kLong);
  expect_all(got_second, 2, "tag 4");
  expect_all(got_first, 1, "tag 3");
  first->wait(kLong);
  second->wait(kLong);
}

void check_receives_may_be_posted_first(Communicator& comm) {
  if (comm.size() == 1) return;
  const at::Tensor got = at::zeros({3, 2}, at::TensorOptions(at::kDouble));
  const WorkPtr recv = comm.recv(got, previous(comm), 5);
  comm.barrier()->wait(kLong);
  comm.send(at::full({3, 2}, 1.5, at::TensorOptions(at::kDouble)), next(comm),
            5)
      ->wait(kLong);
  recv->wait(kLong);
  recv->wait(kLong);  // a second wait is allowed
  expect_all(got, 1.5, "posted first");
  expect(recv->done(), "done after wait");
}

void check_empty_tensors(Communicator& comm) {
  const at::Tensor empty = at::empty({0, 4});
  comm.all_reduce(empty, ReduceOp::kSum)->wait(kLong);
  comm.broadcast(empty, 0)->wait(kLong);
  comm.all_gather(at::empty({0}), empty)->wait(kLong);
  comm.reduce_scatter(at::empty({0}), empty, ReduceOp::kSum)->wait(kLong);
  comm.all_to_all(at::empty({0}), empty)->wait(kLong);
  if (comm.size() == 1) return;
  const WorkPtr send = comm.send(empty, next(comm), 7);
  comm.recv(at::empty({0, 4}), previous(comm), 7)->wait(kLong);
  send->wait(kLong);
}

void check_large_messages_cross(Communicator& comm) {
  if (comm.size() == 1) return;
  const int64_t numel = 4 << 20;  // 16 MB: more than any socket buffer
  const at::Tensor mine = filled(comm.group_rank(), at::kFloat, numel);
  const at::Tensor theirs = at::empty({numel});
  const WorkPtr send = comm.send(mine, next(comm), 8);
  comm.recv(theirs, previous(comm), 8)->wait(kLong);
  send->wait(kLong);
  expect_all(theirs, previous(comm), "large");
}

void check_a_send_need_not_be_waited_for(Communicator& comm) {
  if (comm.size() == 1) return;
  for (int i = 0; i < 3; ++i) comm.send(filled(i), next(comm), 9);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor got = at::zeros({5});
    comm.recv(got, previous(comm), 9)->wait(kLong);
    expect_all(got, i, "not waited for");
  }
}

void check_all_reduce(Communicator& comm) {
  const int n = comm.size();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kLong,
                                     at::kInt, at::kHalf, at::kBFloat16}) {
    const auto reduced = [&](ReduceOp op) {
      at::Tensor tensor = filled(comm.group_rank() + 2, dtype, 7);
      comm.all_reduce(tensor, op)->wait(kLong);
      return tensor;
    };
    expect_all(reduced(ReduceOp::kSum), n * (n - 1) / 2 + 2 * n, "sum");
    expect_all(reduced(ReduceOp::kMax), n + 1, "max");
    expect_all(reduced(ReduceOp::kMin), 2, "min");
  }
}

void check_broadcast_from_each_root(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    const at::Tensor tensor = filled(10 + comm.group_rank(), at::kBFloat16);
    comm.broadcast(tensor, root)->wait(kLong);
    expect_all(tensor, 10 + root, "broadcast");
  }
}

void check_all_gather_orders_by_rank(Communicator& comm) {
  const int n = comm.size();
  const at::Tensor input =
      at::full({2, 3}, comm.group_rank(), at::TensorOptions(at::kHalf));
  const at::Tensor output = at::zeros({2 * n, 3}, at::TensorOptions(at::kHalf));
  comm.all_gather(output, input)->wait(kLong);
  for (int i = 0; i < n; ++i) {
    expect_all(output.narrow(0, 2 * i, 2), i, "all_gather");
  }
  expect_all(input, comm.group_rank(), "input of all_gather");
}

void check_reduce_scatter_gives_own_part(Communicator& comm) {
  const int n = comm.size();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
    // Element i of rank r is i + r.
    const at::Tensor input =
        at::arange(3 * n, at::TensorOptions(dtype)).add(comm.group_rank());
    const at::Tensor before = input.clone();
    const at::Tensor output = at::zeros({3}, at::TensorOptions(dtype));
    comm.reduce_scatter(output, input, ReduceOp::kSum)->wait(kLong);
    const at::Tensor expected = at::arange(3, at::TensorOptions(dtype))
                                    .add(3 * comm.group_rank())
                                    .mul(n)
                                    .add(n * (n - 1) / 2);
    expect(output.equal(expected), "reduce_scatter: expected ", expected,
           ", got ", output);
    expect(input.equal(before), "reduce_scatter changed its input");
    comm.reduce_scatter(output, input, ReduceOp::kMax)->wait(kLong);
    expect_all(output.narrow(0, 0, 1), 3 * comm.group_rank() + n - 1,
               "reduce_scatter max");
  }
}

void check_all_to_all_exchanges_parts(Communicator& comm) {
  const int n = comm.size();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf,
                                     at::kBFloat16, at::kLong, at::kByte}) {
    // Part i of rank r holds 10 r + i.
    const at::Tensor input = at::arange(n, at::TensorOptions(dtype))
                                 .add(10 * comm.group_rank())
                                 .repeat_interleave(3)
                                 .to(dtype);
    const at::Tensor output = at::zeros({n, 3}, at::TensorOptions(dtype));
    comm.all_to_all(output, input)->wait(kLong);
    for (int i = 0; i < n; ++i) {
      expect_all(output.narrow(0, i, 1), 10 * i + comm.group_rank(),
                 "all_to_all");
    }
    expect_all(input.narrow(0, 0, 3), 10 * comm.group_rank(),
               "input of all_to_all");
  }
}

void check_all_to_all_v_exchanges_parts_of_any_size(Communicator& comm) {
  const int own = comm.group_rank();
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kByte}) {
    for (int kind = 0; kind < 5; ++kind) {
      const Table table = uneven_table(comm.size(), kind);
      std::vector<at::Tensor> sent{at::empty({0}, at::TensorOptions(dtype))};
      std::vector<at::Tensor> wanted = sent;
      Counts received;
      for (int rank = 0; rank < comm.size(); ++rank) {
        sent.push_back(uneven_part(own, rank, table[own][rank], dtype));
        wanted.push_back(uneven_part(rank, own, table[rank][own], dtype));
        received.push_back(table[rank][own]);
      }
      const at::Tensor input = at::cat(sent);
      const at::Tensor before = input.clone();
      const at::Tensor expected = at::cat(wanted);
      const at::Tensor output = at::zeros_like(expected);
      comm.all_to_all_v(output, input, received, table[own])->wait(kLong);
      expect(output.equal(expected), "all_to_all_v ", kind, ": wrong elements");
      expect(input.equal(before), "all_to_all_v changed its input");
    }
  }
}

void check_all_to_all_v_disagreement(Communicator& comm) {
  if (comm.size() == 1 || !comm.stamp_next(1)) return;
  const int last = comm.size() - 1;
  Counts sent(comm.size(), 2);
  const Counts received(comm.size(), 2);
  if (comm.group_rank() == 0) sent[last] = 3;
  const auto total = std::accumulate(sent.begin(), sent.end(), int64_t{0});
  const WorkPtr work = comm.all_to_all_v(at::zeros({2 * comm.size()}),
                                         at::zeros({total}), received, sent);
  expect_text(text_of_error("counts", [&] { work->wait(kLong); }),
              "group rank 0 sends 3 elements to group rank " +
                  std::to_string(last) + ", which expects 2");
  const at::Tensor output = at::zeros({comm.size()});
  comm.all_to_all_v(output, filled(comm.group_rank(), at::kFloat, comm.size()),
                    Counts(comm.size(), 1), Counts(comm.size(), 1))
      ->wait(kLong);
  expect(output.equal(at::arange(comm.size(), at::TensorOptions(at::kFloat))),
         "after a disagreement: ", output);
}

void check_barrier_waits_for_the_last(Communicator& comm) {
  const auto now_us = [] {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               Clock::now().time_since_epoch())
        .count();
  };
  if (comm.group_rank() == comm.size() - 1) {
    std::this_thread::sleep_for(milliseconds(60));
  }
  const at::Tensor arrived = at::full({1}, now_us(), at::kLong);
  comm.barrier()->wait(kLong);
  const int64_t left = now_us();  // one clock for all processes of a host
  comm.all_reduce(arrived, ReduceOp::kMax)->wait(kLong);
  expect(left >= arrived.item<int64_t>(),
         "left the barrier before the last "
         "rank came");
}

void check_collectives_in_flight_together(Communicator& comm) {
  std::vector<at::Tensor> tensors;
  std::vector<WorkPtr> works;
  for (int i = 0; i < 8; ++i) {
    tensors.push_back(filled(i, at::kFloat, 1000));
    works.push_back(comm.all_reduce(tensors.back(), ReduceOp::kSum));
  }
  for (int i = 7; i >= 0; --i) {
    works[i]->wait(kLong);
    expect_all(tensors[i], i * comm.size(), "in flight");
  }
}

void check_tensors_of_a_graph_are_accepted(Communicator& comm) {
  at::Tensor parameter = filled(1).set_requires_grad(true);
  comm.broadcast(parameter, 0)->wait(kLong);
  at::Tensor output = at::zeros({5 * comm.size()});
  comm.all_gather(output, parameter)->wait(kLong);
  expect_all(output, 1, "gathered parameter");
  expect(!output.requires_grad(), "all_gather made a graph");
}

void check_threads_may_call_at_once(Communicator& comm) {
  if (comm.size() == 1) return;
  constexpr int kThreads = 3;
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        for (int i = 0; i < 40; ++i) {
          const WorkPtr send =
              comm.send(filled(100 * t + i), next(comm), 10 + t);
          const at::Tensor got = at::zeros({5});
          comm.recv(got, previous(comm), 10 + t)->wait(kLong);
          expect_all(got, 100 * t + i, "thread");
          send->wait(kLong);
        }
      } catch (const std::exception& error) {
        errors[t] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) expect(error.empty(), error);
}

void check_done_turns_true(Communicator& comm) {
  const at::Tensor tensor = filled(1);
  std::vector<WorkPtr> works = {comm.all_reduce(tensor, ReduceOp::kSum)};
  const at::Tensor got = at::zeros({5});
  if (comm.size() > 1) {
    works.push_back(comm.send(filled(2), next(comm), 14));
    works.push_back(comm.recv(got, previous(comm), 14));
  }
  const Clock::time_point deadline = Clock::now() + kLong;
  for (const WorkPtr& work : works) {
    while (!work->done()) {
      expect(Clock::now() < deadline, "never done");
      std::this_thread::sleep_for(milliseconds(1));
    }
    work->wait(kLong);
  }
  expect_all(tensor, comm.size(), "done");
}

// A wait that times out is an error and nothing else: the operation goes on.
void check_timeout_of_recv(Communicator& comm) {
  if (comm.size() == 1) return;
  const at::Tensor got = at::zeros({5});
  const WorkPtr recv = comm.recv(got, previous(comm), 15);
  const Clock::time_point begin = Clock::now();
  const std::string text =
      text_of_error("timeout", [&] { recv->wait(milliseconds(50)); });
  expect_text(text, "timed out after 50 ms");
  expect_text(text, "recv(src=" + std::to_string(previous(comm)));
  expect_text(text, comm.name());
  expect(Clock::now() - begin >= milliseconds(45), "gave up too early");
  comm.barrier()->wait(kLong);
  comm.send(filled(3), next(comm), 15)->wait(kLong);
  recv->wait(kLong);
  expect_all(got, 3, "after the timeout");
}

void check_timeout_of_collective(Communicator& comm) {
  if (comm.size() == 1) return;
  const at::Tensor tensor = filled(1);
  const at::Tensor token = filled(0);
  if (comm.group_rank() == 0) {
    for (int i = 1; i < comm.size(); ++i) {
      comm.recv(token, i, 16)->wait(kLong);
    }
    comm.all_reduce(tensor, ReduceOp::kSum)->wait(kLong);
  } else {
    const WorkPtr work = comm.all_reduce(tensor, ReduceOp::kSum);
    const std::string text =
        text_of_error("timeout", [&] { work->wait(milliseconds(50)); });
    expect_text(text, "all_reduce on " + comm.name());
    expect_text(text, "timed out");
    comm.send(token, 0, 16)->wait(kLong);
    work->wait(kLong);
  }
  expect_all(tensor, comm.size(), "after the timeout");
}

void check_abort_of_one_work(Communicator& comm) {
  if (comm.size() == 1) return;
  const WorkPtr recv = comm.recv(at::zeros({5}), previous(comm), 17);
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    recv->abort();
  });
  std::string text;
  try {
    text = text_of_error("abort", [&] { recv->wait(kLong); });
  } catch (...) {
    other.join();
    throw;
  }
  other.join();
  expect_text(text, "aborted");
  expect_text(text_of_error("again", [&] { recv->wait(kLong); }), "aborted");
  comm.barrier()->wait(kLong);  // everything else still works
}

void check_bad_arguments(Communicator& comm) {
  const at::Tensor good = filled(1);
  const int n = comm.size();
  expect_text(text_of_error("peer", [&] { comm.send(good, n, 0); }),
              "send(dst=");
  expect_text(text_of_error("peer", [&] { comm.recv(good, -1, 0); }),
              "recv(src=-1");
  expect_text(
      text_of_error("self", [&] { comm.send(good, comm.group_rank(), 0); }),
      "itself");
  if (n > 1) {
    expect_text(
        text_of_error("tag", [&] { comm.recv(good, previous(comm), -3); }),
        "a tag that is not negative");
  }
  expect_text(text_of_error("root", [&] { comm.broadcast(good, n); }),
              "expected root in [0, ");
  expect_text(
      text_of_error("undefined",
                    [&] { comm.all_reduce(at::Tensor(), ReduceOp::kSum); }),
      "undefined");
  expect_text(
      text_of_error(
          "strides",
          [&] { comm.all_reduce(at::zeros({4, 4}).t(), ReduceOp::kSum); }),
      "contiguous");
  expect_text(
      text_of_error(
          "bool",
          [&] { comm.all_reduce(filled(1, at::kBool), ReduceOp::kMax); }),
      "Bool[5]");
  expect_text(
      text_of_error("sizes",
                    [&] { comm.all_gather(at::zeros({5 * n + 1}), good); }),
      "times the elements of Float[5]");
  expect_text(
      text_of_error(
          "parts",
          [&] { comm.all_to_all(at::zeros({2 * n}), at::zeros({2 * n + 1})); }),
      "a multiple of");
  expect_text(text_of_error("counts",
                            [&] {
                              comm.all_to_all_v(good, good, Counts(n, 5),
                                                Counts(n + 1, 5));
                            }),
              "counts of the ");
  expect_text(text_of_error("dtypes",
                            [&] {
                              comm.reduce_scatter(filled(0, at::kDouble),
                                                  at::zeros({5 * n}),
                                                  ReduceOp::kSum);
                            }),
              "equal dtypes");
}

// Runs `wait` in a thread; the text of its error, or what else happened.
class WaitingThread {
 public:
  explicit WaitingThread(WorkPtr work)
      : thread_([this, work = std::move(work)] {
          try {
            work->wait(kLong);
            text_ = "no error";
          } catch (const std::exception& error) {
            text_ = error.what();
          }
        }) {}

  std::string text() {
    thread_.join();
    return text_;
  }

 private:
  std::string text_;
  std::thread thread_;
};

}  // namespace

const std::vector<Check>& all_checks() {
  static const std::vector<Check> checks = {
      {"identity", check_identity},
      {"ring_all_dtypes", check_ring_all_dtypes},
      {"one_tag_keeps_order", check_one_tag_keeps_order},
      {"tags_are_apart", check_tags_are_apart},
      {"receives_may_be_posted_first", check_receives_may_be_posted_first},
      {"empty_tensors", check_empty_tensors},
      {"large_messages_cross", check_large_messages_cross},
      {"a_send_need_not_be_waited_for", check_a_send_need_not_be_waited_for},
      {"all_reduce", check_all_reduce},
      {"broadcast_from_each_root", check_broadcast_from_each_root},
      {"all_gather_orders_by_rank", check_all_gather_orders_by_rank},
      {"reduce_scatter_gives_own_part", check_reduce_scatter_gives_own_part},
      {"all_to_all_exchanges_parts", check_all_to_all_exchanges_parts},
      {"all_to_all_v_exchanges_parts_of_any_size",
       check_all_to_all_v_exchanges_parts_of_any_size},
      {"all_to_all_v_disagreement", check_all_to_all_v_disagreement},
      {"barrier_waits_for_the_last", check_barrier_waits_for_the_last},
      {"collectives_in_flight_together", check_collectives_in_flight_together},
      {"tensors_of_a_graph_are_accepted",
       check_tensors_of_a_graph_are_accepted},
      {"threads_may_call_at_once", check_threads_may_call_at_once},
      {"done_turns_true", check_done_turns_true},
      {"timeout_of_recv", check_timeout_of_recv},
      {"timeout_of_collective", check_timeout_of_collective},
      {"abort_of_one_work", check_abort_of_one_work},
      {"bad_arguments", check_bad_arguments},
  };
  return checks;
}

void check_abort_ends_waits(Communicator& comm, bool with_collective) {
  comm.barrier()->wait(kLong);
  std::vector<WorkPtr> works;
  if (comm.size() > 1) {
    works.push_back(comm.recv(at::zeros({5}), previous(comm), 18));
    works.push_back(comm.recv(at::zeros({5}), next(comm), 19));
    if (with_collective && comm.group_rank() != 0) {
      works.push_back(comm.all_reduce(filled(1), ReduceOp::kSum));
    }
  }
  std::vector<std::unique_ptr<WaitingThread>> threads;
  for (const WorkPtr& work : works) {
    threads.push_back(std::make_unique<WaitingThread>(work));
  }
  std::this_thread::sleep_for(milliseconds(100));
  comm.abort();
  comm.abort();
  std::vector<std::string> texts;
  for (const auto& thread : threads) texts.push_back(thread->text());
  for (const std::string& text : texts) expect_text(text, "aborted");
  expect_text(text_of_error("barrier after abort", [&] { comm.barrier(); }),
              "aborted");
  if (comm.size() > 1) {
    expect_text(text_of_error("send after abort",
                              [&] { comm.send(filled(1), next(comm), 20); }),
                "aborted");
  }
}

}  // namespace smp::comm::suite
