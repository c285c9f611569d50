#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/comm/local_world.h"

namespace smp::comm {

/// Runs `body(global_rank, communicator)` on `size` threads over an in-process
/// world and joins them. The first exception aborts the other ranks'
/// communicators and is thrown again as a runtime_error that names the rank.
/// After `deadline` all communicators are aborted and the call throws; a thread
/// that still does not end stops the test program.
inline void run_ranks(
    int size, const std::function<void(int, CommunicatorPtr)>& body,
    std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
  const std::vector<CommunicatorPtr> world = make_local_world(size);
  std::mutex mutex;
  std::condition_variable changed;
  int num_ended = 0;
  std::string failure;
  auto abort_all = [&] {
    for (const CommunicatorPtr& communicator : world) communicator->abort();
  };
  auto run = [&](int global_rank) {
    std::string text;
    try {
      body(global_rank, world[global_rank]);
    } catch (const std::exception& error) {
      text = error.what();
      if (text.empty()) text = "exception without a text";
    } catch (...) {
      text = "exception of unknown type";
    }
    bool is_first = false;
    {
      std::lock_guard lock(mutex);
      is_first = !text.empty() && failure.empty();
      if (is_first) {
        failure = "rank " + std::to_string(global_rank) + ": " + text;
      }
    }
    if (is_first) abort_all();
    std::lock_guard lock(mutex);
    ++num_ended;
    changed.notify_all();
  };

  std::vector<std::thread> threads;
  threads.reserve(size);
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock lock(mutex);
    auto all_ended = [&] { return num_ended == size; };
    if (!changed.wait_for(lock, deadline, all_ended)) {
      if (failure.empty()) {
        failure = std::to_string(size - num_ended) +
                  " ranks did not end within " +
                  std::to_string(deadline.count()) + " ms";
      }
      lock.unlock();
      abort_all();
      lock.lock();
      if (!changed.wait_for(lock, std::chrono::seconds(10), all_ended)) {
        std::fprintf(stderr, "run_ranks: %s, not even after abort\n",
                     failure.c_str());
        std::abort();
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace smp::comm
