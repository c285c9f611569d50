#include "tests/cpp/lanes/cuda/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <utility>

#include "csrc/common/check.h"

namespace smp::lanes {
namespace {

constexpr int kMaxDims = 6;

struct Head {
  int32_t kind = 0;
  int32_t lane = 0;
  int32_t slot = 0;
  int32_t dtype = 0;
  int64_t sequence = 0;
  int64_t num_bytes = 0;
  int64_t num_dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  uint64_t size = 0;  // of the bytes that follow
};

Head head_of(const Letter& letter) {
  const Descriptor& what = letter.descriptor;
  Head head{.kind = static_cast<int32_t>(letter.kind),
            .lane = static_cast<int32_t>(what.lane),
            .slot = what.slot,
            .dtype = static_cast<int32_t>(what.dtype),
            .sequence = what.sequence,
            .num_bytes = what.num_bytes,
            .num_dims = static_cast<int64_t>(what.sizes.size()),
            .size = letter.bytes.size()};
  for (size_t i = 0; i < what.sizes.size(); ++i) {
    head.sizes.at(i) = what.sizes[i];
  }
  return head;
}

Letter letter_of(const Head& head) {
  Letter letter{.kind = static_cast<Letter::Kind>(head.kind)};
  letter.descriptor = {
      .lane = static_cast<LaneKind>(head.lane),
      .slot = head.slot,
      .sequence = head.sequence,
      .num_bytes = head.num_bytes,
      .dtype = static_cast<at::ScalarType>(head.dtype),
      .sizes = {head.sizes.begin(), head.sizes.begin() + head.num_dims}};
  letter.bytes.resize(head.size);
  return letter;
}

bool write_all(int socket, const void* bytes, size_t size) {
  const auto* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t num = ::send(socket, at, size, MSG_NOSIGNAL);
    if (num <= 0) return false;
    at += num;
    size -= static_cast<size_t>(num);
  }
  return true;
}

bool read_all(int socket, void* bytes, size_t size) {
  auto* at = static_cast<char*>(bytes);
  while (size > 0) {
    const ssize_t num = ::recv(socket, at, size, 0);
    if (num <= 0) return false;
    at += num;
    size -= static_cast<size_t>(num);
  }
  return true;
}

}  // namespace

Links::Links(int rank, std::vector<int> sockets)
    : rank_(rank),
      sockets_(std::move(sockets)),
      board_(std::make_shared<health::FaultBoard>(rank)),
      exchanged_(sockets_.size()) {
  std::thread([this] { receive(); }).detach();
}

void Links::send(int dst, const Letter& letter) {
  const Head head = head_of(letter);
  const std::lock_guard lock(send_mutex_);
  if (write_all(sockets_.at(dst), &head, sizeof(head))) {
    write_all(sockets_.at(dst), letter.bytes.data(), letter.bytes.size());
  }
}

void Links::add(int src, Letter letter) {
  {
    const std::lock_guard lock(mutex_);
    if (letter.kind == Letter::Kind::kBytes) {
      exchanged_.at(src).push_back(std::move(letter.bytes));
    } else {
      letters_.emplace_back(src, std::move(letter));
    }
  }
  changed_.notify_all();
}

void Links::receive() {
  std::vector<pollfd> waited;
  for (const int socket : sockets_) waited.push_back({socket, POLLIN, 0});
  std::vector<bool> has_left(sockets_.size());
  while (true) {
    ::poll(waited.data(), waited.size(), -1);
    for (size_t src = 0; src < waited.size(); ++src) {
      if (waited[src].revents == 0) continue;
      Head head;
      Letter letter;
      const int socket = sockets_[src];
      bool is_here = read_all(socket, &head, sizeof(head));
      if (is_here) {
        letter = letter_of(head);
        is_here = read_all(socket, letter.bytes.data(), head.size);
      }
      if (!is_here) {
        waited[src].fd = -1;
        if (has_left[src]) continue;
        board_->report({.kind = health::Fault::Kind::kDied,
                        .global_rank = static_cast<int>(src),
                        .text = "its connection has ended"});
        changed_.notify_all();
      } else if (letter.kind == Letter::Kind::kGoodbye) {
        has_left[src] = true;
      } else {
        add(static_cast<int>(src), std::move(letter));
      }
    }
  }
}

std::optional<std::pair<int, Letter>> Links::next(
    std::chrono::microseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [this] { return !letters_.empty(); });
  if (letters_.empty()) return std::nullopt;
  auto first = std::move(letters_.front());
  letters_.pop_front();
  return first;
}

std::vector<std::string> Links::exchange(const std::string& own) {
  for (int dst = 0; dst < size(); ++dst) {
    if (dst != rank_) send(dst, {.bytes = own});
  }
  std::vector<std::string> all(size());
  std::unique_lock lock(mutex_);
  for (int src = 0; src < size(); ++src) {
    if (src == rank_) {
      all[src] = own;
      continue;
    }
    auto& coming = exchanged_[src];
    while (coming.empty()) {
      board_->raise_if_faulted();  // no one may tell that there is a fault
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
    all[src] = std::move(coming.front());
    coming.pop_front();
  }
  return all;
}

void Links::say_goodbye() {
  for (int dst = 0; dst < size(); ++dst) {
    if (dst != rank_) send(dst, {.kind = Letter::Kind::kGoodbye});
  }
}

// ----------------------------------------------------------------- processes

namespace {

[[noreturn]] void run_as_child(int rank, std::vector<int> sockets, int output,
                               const std::function<void(Links&)>& of_rank) {
  std::fflush(nullptr);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  auto* const links = new Links(rank, std::move(sockets));
  bool has_thrown = true;
  try {
    of_rank(*links);
    has_thrown = false;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "global_rank %d: %s\n", rank, error.what());
  }
  std::fflush(nullptr);
  ::_exit(has_thrown || ::testing::Test::HasFailure() ? 1 : 0);
}

int num_threads() {
  namespace fs = std::filesystem;
  return static_cast<int>(
      std::distance(fs::directory_iterator("/proc/self/task"), {}));
}

class Children {
 public:
  explicit Children(int size) : sockets_(size, std::vector<int>(size, -1)) {
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        std::array<int, 2> ends{};
        SMP_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0,
                               ends.data()) == 0,
                  "no sockets");
        sockets_[a][b] = ends[0];
        sockets_[b][a] = ends[1];
      }
    }
  }

  void start(const std::function<void(Links&)>& of_rank) {
    for (size_t rank = 0; rank < sockets_.size(); ++rank) {
      std::array<int, 2> ends{};
      SMP_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, "no pipe");
      const pid_t pid = ::fork();
      SMP_CHECK(pid >= 0, "no process");
      if (pid == 0) {
        for (size_t other = 0; other < sockets_.size(); ++other) {
          if (other != rank) close_all(sockets_[other]);
        }
        run_as_child(static_cast<int>(rank), sockets_[rank], ends[1], of_rank);
      }
      ::close(ends[1]);
      pids_.push_back(pid);
      outputs_.push_back(ends[0]);
    }
    for (const auto& own : sockets_) close_all(own);
  }

  std::vector<RankEnd> wait(std::chrono::seconds patience) {
    const auto limit = std::chrono::steady_clock::now() + patience;
    std::vector<RankEnd> ends(pids_.size());
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      read_output(rank, limit, ends[rank]);
      int status = 0;
      ::waitpid(pids_[rank], &status, 0);
      if (WIFEXITED(status)) ends[rank].code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) ends[rank].signal = WTERMSIG(status);
    }
    return ends;
  }

 private:
  static void close_all(const std::vector<int>& sockets) {
    for (const int socket : sockets) {
      if (socket >= 0) ::close(socket);
    }
  }

  // Reads until the process has ended.
  void read_output(size_t rank, std::chrono::steady_clock::time_point limit,
                   RankEnd& end) {
    std::array<char, 4096> bytes{};
    while (true) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          limit - std::chrono::steady_clock::now());
      pollfd waited{outputs_[rank], POLLIN, 0};
      if (left.count() <= 0 ||
          ::poll(&waited, 1, static_cast<int>(left.count())) == 0) {
        end.has_hung = true;
        ::kill(pids_[rank], SIGKILL);
        break;
      }
      const ssize_t num = ::read(outputs_[rank], bytes.data(), bytes.size());
      if (num <= 0) break;
      end.output.append(bytes.data(), static_cast<size_t>(num));
    }
    ::close(outputs_[rank]);
  }

  std::vector<std::vector<int>> sockets_;  // [rank][peer]
  std::vector<pid_t> pids_;
  std::vector<int> outputs_;
};

}  // namespace

std::vector<RankEnd> run_ranks(int size,
                               const std::function<void(Links&)>& of_rank,
                               std::chrono::seconds patience) {
  SMP_CHECK(num_threads() == 1, "a process with threads is forked");
  Children children(size);
  children.start(of_rank);
  return children.wait(patience);
}

void expect_good(const std::vector<RankEnd>& ends) {
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].is_good())
        << "global_rank " << rank << ": code " << ends[rank].code << ", signal "
        << ends[rank].signal << (ends[rank].has_hung ? ", hung" : "") << "\n"
        << ends[rank].output;
  }
}

}  // namespace smp::lanes
