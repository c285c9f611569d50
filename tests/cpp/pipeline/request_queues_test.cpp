#include "csrc/pipeline/request_queues.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

// Requests that note in which order they get ready.
class Requests {
 public:
  explicit Requests(RequestQueues& queues) : queues_(queues) {}

  // A request that misses `num_missing` tensors; read at once.
  std::shared_ptr<Service> add(int rank, int64_t context, int64_t id,
                               int num_missing = 0) {
    auto service = std::make_shared<Service>();
    service->caller_rank = rank;
    service->caller_context = context;
    service->request_id = id;
    service->where = "request " + std::to_string(id);
    service->make_ready = [this, id] { ready.push_back(id); };
    queues_.add(service);
    for (int i = 0; i < num_missing; ++i) queues_.expect(*service);
    queues_.arrived(service);
    return service;
  }

  std::vector<int64_t> ready;

 private:
  RequestQueues& queues_;
};

using Ids = std::vector<int64_t>;

TEST(RequestQueues, a_request_is_ready_when_it_is_read_and_all_tensors_came) {
  RequestQueues queues;
  Requests requests(queues);
  const auto service = requests.add(0, 1, 10, 2);
  EXPECT_TRUE(requests.ready.empty());
  queues.arrived(service);
  EXPECT_TRUE(requests.ready.empty());
  queues.arrived(service);
  EXPECT_EQ(requests.ready, Ids{10});
}

TEST(RequestQueues, requests_of_a_context_run_in_the_order_of_their_issue) {
  RequestQueues queues;
  Requests requests(queues);
  const auto first = requests.add(0, 1, 10, 1);
  const auto second = requests.add(0, 1, 11);
  const auto third = requests.add(0, 1, 12, 1);
  EXPECT_TRUE(requests.ready.empty()) << "the second is complete, but second";
  queues.arrived(first);
  EXPECT_EQ(requests.ready, Ids{10}) << "one at a time";
  EXPECT_EQ(queues.finish(*first), std::nullopt);
  EXPECT_EQ(requests.ready, (Ids{10, 11}));
  EXPECT_EQ(queues.finish(*second), std::nullopt);
  EXPECT_EQ(requests.ready, (Ids{10, 11})) << "the third waits for a tensor";
  queues.arrived(third);
  EXPECT_EQ(requests.ready, (Ids{10, 11, 12}));
  EXPECT_EQ(queues.finish(*third), 12) << "nothing is left: tell the caller";
  EXPECT_EQ(queues.size(), 0);
}

TEST(RequestQueues, contexts_and_ranks_do_not_wait_for_each_other) {
  RequestQueues queues;
  Requests requests(queues);
  const auto blocked = requests.add(0, 1, 10, 1);
  const auto other_context = requests.add(0, 2, 11);
  const auto other_rank = requests.add(1, 1, 10);
  EXPECT_EQ(requests.ready, (Ids{11, 10}));
  EXPECT_EQ(queues.finish(*other_rank), 10);
  EXPECT_EQ(queues.finish(*other_context), 11);
  EXPECT_EQ(queues.size(), 1);
  queues.arrived(blocked);
  EXPECT_EQ(queues.finish(*blocked), 10);
}

TEST(RequestQueues, each_time_a_context_has_nothing_left_its_caller_is_told) {
  RequestQueues queues;
  Requests requests(queues);
  for (const int64_t id : {10, 11, 12}) {
    EXPECT_EQ(queues.finish(*requests.add(0, 1, id)), id);
  }
}

TEST(RequestQueues, a_request_that_ends_out_of_order_is_our_bug) {
  RequestQueues queues;
  Requests requests(queues);
  requests.add(0, 1, 10);
  const auto second = requests.add(0, 1, 11);
  EXPECT_THROW(queues.finish(*second), InternalError);
}

TEST(RequestQueues, the_end_of_an_abandoned_request_is_nobodys_business) {
  RequestQueues queues;
  Requests requests(queues);
  const auto service = requests.add(0, 1, 10);
  queues.clear();
  EXPECT_EQ(queues.size(), 0);
  EXPECT_EQ(queues.finish(*service), std::nullopt);
}

TEST(RequestQueues, tables_name_the_first_request_that_misses_tensors) {
  RequestQueues queues;
  Requests requests(queues);
  requests.add(0, 1, 10, 2);
  requests.add(0, 1, 11, 1);
  requests.add(0, 2, 12);
  EXPECT_EQ(queues.describe(), "request 10: waiting for 2 tensors");
}

TEST(RequestQueues, tensors_from_many_threads_never_change_the_order) {
  constexpr int kRequests = 300;
  constexpr int kThreads = 3;
  RequestQueues queues;
  std::vector<int64_t> order;  // one request runs at a time
  std::vector<std::shared_ptr<Service>> services;
  std::atomic<bool> is_over{false};
  for (int64_t id = 0; id < kRequests; ++id) {
    auto service = std::make_shared<Service>();
    service->caller_rank = 0;
    service->caller_context = 1;
    service->request_id = id;
    service->make_ready = [&, weak = std::weak_ptr<Service>(service)] {
      const auto self = weak.lock();
      order.push_back(self->request_id);
      if (const auto last = queues.finish(*self)) {
        EXPECT_EQ(*last, kRequests - 1);
        is_over = true;
      }
    };
    services.push_back(service);
    queues.add(service);
    for (int i = 0; i < kThreads; ++i) queues.expect(*service);
  }
  std::vector<std::thread> threads;
  for (int part = 0; part < kThreads; ++part) {
    threads.emplace_back([&, part] {
      for (int i = 0; i < kRequests; ++i) {
        queues.arrived(services[part == 1 ? kRequests - 1 - i : i]);
      }
    });
  }
  for (const auto& service : services) queues.arrived(service);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(is_over);
  ASSERT_EQ(order.size(), kRequests);
  for (int i = 0; i < kRequests; ++i) EXPECT_EQ(order[i], i);
  EXPECT_EQ(queues.size(), 0);
}

}  // namespace
}  // namespace smp::pipeline
