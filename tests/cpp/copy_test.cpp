// Tests of the copy transport on a stand-in for the driver (fake_driver.cpp), with ranks as threads:
// delivery, more flags than one batch takes, and what happens around a rank that gives up.
// Usage: copy_test [seed]
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../cpp/board.h"
#include "../../cpp/executor.h"
#include "../../cpp/transport_copy.h"
#include "check.h"

using namespace distflash;

extern "C" void fake_enqueue(CUstream stream, std::function<void()>* work);
extern "C" void fake_before_unmapping(std::function<void()>* work);

namespace {

constexpr std::int64_t slot_bytes = 256;

struct Move {
  int step, source, target;
};

// Where the ranks meet to exchange strings.
class Meeting {
 public:
  explicit Meeting(int num_ranks) : words_(num_ranks) {}
  std::vector<std::string> exchange(int rank, const std::string& own) {
    std::unique_lock lock(mutex_);
    const int turn = turn_;
    words_[rank] = own;
    if (++num_here_ == static_cast<int>(words_.size())) {
      heard_ = words_;
      num_here_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
    return heard_;  // stays until all of these ranks come again
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> words_, heard_;
  int num_here_ = 0, turn_ = 0;
};

// A rank's slots: one for each step and source, and behind them one for each step and target, where
// it stages what it sends.
std::int64_t slot_of(int num_ranks, int step, int source) {
  return (static_cast<std::int64_t>(step) * num_ranks + source) * slot_bytes;
}
std::int64_t staged_slot_of(int num_ranks, int num_steps, int step, int target) {
  return slot_of(num_ranks, num_steps + step, target);
}

struct Rank {
  std::shared_ptr<Communicator> communicator;
  std::unique_ptr<Executor> executor;
  CUstream compute = nullptr;
  std::vector<std::vector<unsigned char>> sources;

  Rank(Meeting& meeting, int rank, int num_ranks, int num_steps, double deadline_s,
       const std::vector<Move>& moves)
      : sources(moves.size(), std::vector<unsigned char>(slot_bytes)) {
    auto device = std::make_unique<CudaDevice>();
    auto transport = std::make_unique<CopyTransport>(
        *device, rank, num_ranks,
        [&](const std::string& own) { return meeting.exchange(rank, own); });
    communicator = std::make_shared<Communicator>(rank, num_ranks, deadline_s, std::move(device),
                                                  std::move(transport), Hold::never);
    std::vector<Transfer> transfers;
    for (const Move& move : moves) {
      const std::string name = "bytes from " + std::to_string(move.source);
      const std::int64_t lands = slot_of(num_ranks, move.step, move.source);
      const std::int64_t staged = staged_slot_of(num_ranks, num_steps, move.step, move.target);
      if (move.source == rank) {
        transfers.push_back({move.step, move.step + 1, Side::send, move.target, name,
                             {{slot_bytes, staged, 0}}});
      }
      if (move.target == rank) {
        transfers.push_back({move.step, move.step + 1, Side::receive, move.source, name,
                             {{slot_bytes, lands, staged}}});
      }
    }
    executor = std::make_unique<Executor>(
        communicator, make_rank_plan("test", rank, num_ranks, num_steps,
                                     slot_of(num_ranks, 2 * num_steps, 0), std::move(transfers)));
    executor->import_workspaces(meeting.exchange(rank, executor->export_workspace()));
    CudaDriver::get().cuStreamCreateWithPriority(&compute, 0, 0);
  }

  Stream stream() const { return reinterpret_cast<Stream>(compute); }
  void then(std::function<void()> work) { fake_enqueue(compute, &work); }
  void synchronize() { CHECK(is_idle_within(compute, 30)); }
  unsigned char* slot(int num_ranks, int step, int source) {
    return reinterpret_cast<unsigned char*>(executor->workspace()) +
           slot_of(num_ranks, step, source);
  }
  void close(Meeting& meeting, int rank) {
    executor->unmap_workspaces();
    meeting.exchange(rank, "");
    executor->close();
    communicator->unmap_peers();
    meeting.exchange(rank, "");  // flags outlive their mappings
    communicator->close(30);
    executor.reset();
    communicator.reset();
    CudaDriver::get().cuStreamDestroy(compute);
  }
};

void on_all_ranks(int num_ranks, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

unsigned char pattern(const Move& move, int call) {
  return static_cast<unsigned char>(1 + 31 * move.source + 17 * move.step + 7 * call);
}

// Fills what a step sends when its turn comes, posts it, and hands over what arrived to ``look``.
void run_call(Rank& own, int rank, int num_steps, int call, const std::vector<Move>& moves,
              const std::function<void(const Move&)>& look) {
  for (int step = 0; step < num_steps; ++step) {
    std::vector<std::uintptr_t> pointers;
    for (std::size_t i = 0; i < moves.size(); ++i) {
      if (moves[i].step != step || moves[i].source != rank) continue;
      unsigned char* source = own.sources[i].data();
      own.then([source, byte = pattern(moves[i], call)] {
        for (std::int64_t b = 0; b < slot_bytes; ++b) source[b] = byte;
      });
      pointers.push_back(reinterpret_cast<std::uintptr_t>(source));
    }
    own.executor->open_step(step, pointers, own.stream());
    own.executor->close_step(own.stream());
    for (const Move& move : moves) {
      if (move.step == step && move.target == rank) own.then([look, move] { look(move); });
    }
  }
}

void test_delivery(int num_ranks, int num_steps, const std::vector<Move>& moves) {
  Meeting meeting(num_ranks);
  on_all_ranks(num_ranks, [&](int rank) {
    Rank own(meeting, rank, num_ranks, num_steps, 30, moves);
    for (int call = 0; call < 3; ++call) {
      run_call(own, rank, num_steps, call, moves, [&own, num_ranks, call](const Move& move) {
        const unsigned char* slot = own.slot(num_ranks, move.step, move.source);
        for (std::int64_t b = 0; b < slot_bytes; ++b) CHECK(slot[b] == pattern(move, call));
      });
    }
    own.synchronize();
    own.communicator->check();
    own.close(meeting, rank);
  });
}

std::vector<Move> random_moves(int num_ranks, int num_steps, std::mt19937& random) {
  std::vector<Move> moves;
  for (int step = 0; step < num_steps; ++step) {
    for (int source = 0; source < num_ranks; ++source) {
      for (int target = 0; target < num_ranks; ++target) {
        if (source != target && random() % 3 == 0) moves.push_back({step, source, target});
      }
    }
  }
  return moves;
}

// Rank 0 talks to so many that one batch of memory operations does not take their flags.
void test_more_flags_than_a_batch_takes() {
  constexpr int num_ranks = 90;
  std::vector<Move> moves;
  for (int peer = 1; peer < num_ranks; ++peer) {
    moves.push_back({0, 0, peer});
    moves.push_back({0, peer, 0});
  }
  test_delivery(num_ranks, 1, moves);
}

// Rank 2 stops after the first call. Rank 0 misses it and gives up; rank 1, which has plenty of time,
// waits for rank 0 only. It must give up too, before anything reaches it that is not in step: the
// bytes of the first call, which still lie where rank 0 staged them.
void test_a_rank_that_gives_up_takes_the_others_along() {
  const std::vector<Move> moves{{0, 2, 0}, {1, 0, 1}, {1, 1, 0}};
  constexpr int num_ranks = 3, num_steps = 2;
  Meeting meeting(num_ranks);
  std::atomic<int> num_poisoned = 0;
  const auto begun = Clock::now();
  on_all_ranks(num_ranks, [&](int rank) {
    Rank own(meeting, rank, num_ranks, num_steps, rank == 0 ? 0.3 : 60, moves);
    run_call(own, rank, num_steps, 0, moves, [](const Move&) {});
    own.synchronize();
    meeting.exchange(rank, "");
    std::string message;
    if (rank != 2) {
      try {
        run_call(own, rank, num_steps, 1, moves, [&](const Move& move) {
          const unsigned char byte = *own.slot(num_ranks, move.step, move.source);
          CHECK(byte != pattern(move, 0));
          if (byte == 0xFF) ++num_poisoned;
        });
        while (true) {
          own.communicator->check();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      } catch (const CommunicationError& error) {
        message = error.what();
      }
      CHECK(message.find("step 0 of the test plan: no end after 0.3 s of receiving bytes from 2") !=
            std::string::npos);
      CHECK(rank == 0 || message.find("rank 1") != std::string::npos);
      own.synchronize();
    }
    meeting.exchange(rank, "");
    own.close(meeting, rank);
  });
  const std::chrono::duration<double> took = Clock::now() - begun;
  CHECK(num_poisoned >= 1);
  CHECK(took.count() < 15);
}

// Rank 1 stays away from the second call, and rank 0 goes to unmap its memory. The driver may wait
// for what is enqueued when memory is unmapped: then the watchdog must be able to end that. Nothing
// that is being read is unmapped.
void test_unmapping_while_a_rank_is_missing(bool waits_in_driver) {
  const std::vector<Move> moves{{0, 1, 0}};
  constexpr int num_ranks = 2, num_steps = 1;
  Meeting meeting(num_ranks);
  on_all_ranks(num_ranks, [&](int rank) {
    Rank own(meeting, rank, num_ranks, num_steps, 0.3, moves);
    run_call(own, rank, num_steps, 0, moves, [](const Move&) {});
    own.synchronize();
    const std::string handle = meeting.exchange(rank, own.executor->export_workspace())[1];
    if (rank == 0) {
      void* mapped = waits_in_driver ? own.communicator->transport().import_memory(handle) : nullptr;
      run_call(own, rank, num_steps, 1, moves, [](const Move&) {});
      const auto side = reinterpret_cast<CUstream>(own.communicator->device().side_stream());
      std::function<void()> look = [=] { CHECK(is_idle_within(side, waits_in_driver ? 15 : 0)); };
      fake_before_unmapping(&look);
      if (waits_in_driver) own.communicator->transport().unmap_memory(mapped);
    }
    own.close(meeting, rank);
  });
}

void test_board() {
  Board first, second, third;
  for (Board* board : {&second, &third}) first.add(board == &second ? 1 : 2, board->handle());
  second.add(0, first.handle());
  CHECK(!first.read() && !second.read() && !first.have_all_posted());
  second.post("a long story " + std::string(5000, 'x'));
  second.post("another one");
  CHECK(first.read()->rfind("a long story xxx", 0) == 0 && first.read()->size() == 1019);
  CHECK(!first.have_all_posted() && !second.read());
  third.post("");
  CHECK(first.have_all_posted());
  bool is_refused = false;
  try {
    first.add(3, "/proc/self/fd/no such file");
  } catch (const std::runtime_error& error) {
    is_refused = std::string(error.what()).find("rank 3 shares cannot be opened") !=
                 std::string::npos;
  }
  CHECK(is_refused);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  std::mt19937 random(seed);
  test_board();
  for (int num_ranks = 2; num_ranks <= 5; ++num_ranks) {
    const int num_steps = 1 + static_cast<int>(random() % 6);
    test_delivery(num_ranks, num_steps, random_moves(num_ranks, num_steps, random));
  }
  test_a_rank_that_gives_up_takes_the_others_along();
  for (bool waits_in_driver : {false, true}) test_unmapping_while_a_rank_is_missing(waits_in_driver);
  test_more_flags_than_a_batch_takes();
  std::printf("ok\n");
}
