// Tests of the executor on the host transport, to be built with a sanitizer: random plans whose
// slots are reused at once, computed on asynchronous streams that sleep at random; and ranks that are
// late, dead or of another opinion. Usage: executor_test [seed]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../../cpp/executor.h"
#include "../../cpp/tape.h"
#include "../../cpp/transport_host.h"
#include "check.h"

using namespace distflash;

namespace {

struct Move {
  int step, source, target, slot;
  std::int64_t num_bytes;
  int patience = 1;  // read that many steps later
};

constexpr int max_patience = 2;
constexpr int num_slots = 2 * (max_patience + 1);
constexpr std::int64_t slot_bytes = 4096;

// What is received in a step is read in one of the next two, and its slot is free in the one after.
std::vector<Move> random_moves(int num_ranks, int num_steps, std::mt19937& random) {
  std::vector<Move> moves;
  auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  for (int step = 0; step < num_steps; ++step) {
    for (int target = 0; target < num_ranks; ++target) {
      for (int patience = 1; patience <= max_patience; ++patience) {
        if (num_ranks == 1 || below(5) < 2) continue;
        const int source = (target + 1 + below(num_ranks - 1)) % num_ranks;
        const int slot = 2 * (step % (max_patience + 1)) + patience - 1;
        moves.push_back({step, source, target, slot, 1 + below(slot_bytes), patience});
      }
    }
  }
  return moves;
}

RankPlan plan_of(int rank, int num_ranks, int num_steps, const std::vector<Move>& moves) {
  std::vector<Transfer> transfers;
  for (const Move& move : moves) {
    const std::string name = "bytes from " + std::to_string(move.source);
    const Part part{move.num_bytes, move.slot * slot_bytes, 0};
    const int needed = move.step + move.patience;
    if (move.source == rank) {
      transfers.push_back({move.step, needed, Side::send, move.target, name, {part}});
    }
    if (move.target == rank) {
      transfers.push_back({move.step, needed, Side::receive, move.source, name, {part}});
    }
  }
  return make_rank_plan("test", rank, num_ranks, num_steps, num_slots * slot_bytes,
                        std::move(transfers));
}

unsigned char pattern(const Move& move, int call, std::int64_t i) {
  return static_cast<unsigned char>(31 * move.source + 17 * move.step + 7 * call + i);
}

std::shared_ptr<Communicator> communicator(std::shared_ptr<HostHub> hub, int rank,
                                           double deadline_s) {
  return std::make_shared<Communicator>(rank, hub->num_ranks(), deadline_s,
                                        std::make_unique<HostDevice>(),
                                        std::make_unique<HostTransport>(hub, rank));
}

void on_all_ranks(int num_ranks, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

void sleep_us(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- delivery -------------------------------------------------------------------------------------

// One rank's call: its compute stream fills what it sends, and checks and overwrites what it got.
void run_call(Executor& executor, HostStream& compute, int rank, int num_steps, int call,
              const std::vector<Move>& moves, std::vector<std::vector<unsigned char>>& sources) {
  auto* workspace = reinterpret_cast<unsigned char*>(executor.workspace());
  executor.begin(compute.handle());
  std::size_t num_sent = 0;
  for (int step = 0; step < num_steps; ++step) {
    std::vector<std::uintptr_t> pointers;
    for (const Move& move : moves) {
      if (move.step != step || move.source != rank) continue;
      unsigned char* buffer = sources[num_sent++].data();
      pointers.push_back(reinterpret_cast<std::uintptr_t>(buffer));
      compute.enqueue([=] {
        for (std::int64_t i = 0; i < move.num_bytes; ++i) buffer[i] = pattern(move, call, i);
      });
    }
    executor.reach(compute.handle());
    const bool is_late = (call + step) % 2 == 0;  // posted after the step's work
    if (!is_late) executor.post(step, pointers, compute.handle());
    for (const Move& move : moves) {
      if (move.step + move.patience != step || move.target != rank) continue;
      compute.enqueue([=] {
        unsigned char* slot = workspace + move.slot * slot_bytes;
        sleep_us((call * 37 + step * 11) % 200);
        for (std::int64_t i = 0; i < move.num_bytes; ++i) CHECK(slot[i] == pattern(move, call, i));
        std::memset(slot, 0xEE, move.num_bytes);
      });
    }
    if (is_late) executor.post(step, pointers, compute.handle());
    if (step + 1 < num_steps) {
      const int num_done = executor.wait(step + 1, compute.handle());
      CHECK(0 <= num_done && num_done <= step + 1);
    }
  }
  executor.finish(compute.handle());
}

void test_delivery(int num_ranks, unsigned seed) {
  std::mt19937 random(seed);
  const int num_steps = 1 + static_cast<int>(random() % 9);
  const auto moves = random_moves(num_ranks, num_steps, random);
  auto hub = std::make_shared<HostHub>(num_ranks, seed, 150);
  on_all_ranks(num_ranks, [&](int rank) {
    auto ours = communicator(hub, rank, 30);
    HostStream first, second;
    Executor executor(ours, plan_of(rank, num_ranks, num_steps, moves));
    std::vector<std::vector<unsigned char>> sources(
        max_patience * num_ranks * num_steps, std::vector<unsigned char>(slot_bytes));
    for (int call = 0; call < 4; ++call) {
      // Another stream now and then: the slots' last readers are on the other one.
      HostStream& compute = call % 2 == 0 ? first : second;
      run_call(executor, compute, rank, num_steps, call, moves, sources);
      compute.synchronize();
    }
    CHECK(ours->memory_reserved_bytes() == num_slots * slot_bytes);
    executor.close();
    CHECK(ours->memory_reserved_bytes() == 0);
    ours->close(30);
  });
}

// ---- tapes ----------------------------------------------------------------------------------------

constexpr int words_per_slot = 48;  // 3 blocks of 4 rows of 4 words

std::uint32_t word_of(const Move& move) { return 1000 * move.source + 10 * move.step + 1; }

// Fills what each step sends, moves it, and copies what arrived into results, all by one call. The
// buffers: sources, results. Transposed in between: a result is 4 blocks of 3 rows, 8 words apart.
std::vector<Note> notes_of(int rank, int num_steps, bool is_late, const std::vector<Move>& moves) {
  std::vector<Note> notes;
  std::int64_t num_sent = 0, num_received = 0;
  for (int step = 0; step < num_steps; ++step) {
    std::vector<Pointer> sent;
    for (const Move& move : moves) {
      if (move.step != step || move.source != rank) continue;
      const std::int64_t place = 4 * words_per_slot * num_sent++;
      notes.push_back({"fill", {0}, {{0, 0, place}}, {16, 16, 12, word_of(move)}, ""});
      sent.push_back({static_cast<int>(sent.size()), 0, place});
    }
    notes.push_back({"open", std::vector<std::uint64_t>(sent.size()), sent, {step}, ""});
    if (is_late) notes.push_back({"fill", {0}, {{0, 0, -4}}, {4, 4, 1, 7}, ""});
    for (const Move& move : moves) {
      if (move.step + move.patience != step || move.target != rank) continue;
      const std::int64_t place = 2 * 4 * words_per_slot * num_received++;
      notes.push_back({"copy", {0, 0},
                       {{0, 1, place}, {1, 2, move.slot * slot_bytes}},
                       {32, 96, 48, 16, 16, 3, 4}, ""});
    }
    notes.push_back({"close", {}, {}, {}, ""});
  }
  return notes;
}

void test_tape(int num_ranks, bool is_late, unsigned seed) {
  std::mt19937 random(seed);
  const int num_steps = 3 + static_cast<int>(random() % 6);
  auto moves = random_moves(num_ranks, num_steps, random);
  for (Move& move : moves) move.num_bytes = 4 * words_per_slot;
  auto hub = std::make_shared<HostHub>(num_ranks, seed, 100);
  on_all_ranks(num_ranks, [&](int rank) {
    auto ours = communicator(hub, rank, 30);
    HostStream compute;
    auto executor =
        std::make_shared<Executor>(ours, plan_of(rank, num_ranks, num_steps, moves));
    executor->set_late(is_late);
    CHECK(executor->is_late() == is_late);
    Tape tape(executor, {}, 3, notes_of(rank, num_steps, is_late, moves));
    std::vector<std::vector<std::uint32_t>> sources(3), results(3);
    for (int call = 0; call < 3; ++call) {
      sources[call].resize(1 + words_per_slot * moves.size());
      results[call].resize(2 * words_per_slot * moves.size(), 5);
      tape.run({reinterpret_cast<std::uintptr_t>(sources[call].data() + 1),
                reinterpret_cast<std::uintptr_t>(results[call].data()), executor->workspace()},
               compute.handle());
    }
    compute.synchronize();
    for (const auto& result : results) {
      std::size_t place = 0;
      for (int step = 0; step < num_steps; ++step) {
        for (const Move& move : moves) {
          if (move.step + move.patience != step || move.target != rank) continue;
          for (int word = 0; word < 2 * words_per_slot; ++word) {
            CHECK(result[place++] == (word % 8 < 4 ? word_of(move) : 5));
          }
        }
      }
    }
    executor->close();
    ours->close(30);
  });
}

const char* refusing_cast(const distflash_shape* shape, const distflash_tensor* out,
                          const distflash_tensor* acc, std::int32_t dtype, distflash_stream) {
  CHECK(shape->seq == 3 && out->data == reinterpret_cast<void*>(64) && out->seq_stride == 7);
  CHECK(acc->data == reinterpret_cast<void*>(32) && dtype == 1);
  return "not today";
}

void test_tapes_are_checked() {
  auto ours = communicator(std::make_shared<HostHub>(1), 0, 5);
  auto executor = std::make_shared<Executor>(ours, plan_of(0, 1, 1, {}));
  Kernels kernels;
  kernels.cast = refusing_cast;
  const auto error_of = [](const std::function<void()>& work) -> std::string {
    try {
      work();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto refusal = [&](Note note) {
    return error_of([&] { Tape(executor, kernels, 1, {std::move(note)}); });
  };
  CHECK(refusal({"close", {}, {}, {}, ""}).empty());
  CHECK(contains(refusal({"dance", {}, {}, {}, ""}), "nobody knows"));
  CHECK(contains(refusal({"merge", {}, {}, {0}, ""}), "its function was not given"));
  CHECK(contains(refusal({"cast", {0}, {}, {0}, ""}), "number of words"));
  CHECK(contains(refusal({"open", {}, {}, {}, ""}), "number of numbers"));
  CHECK(contains(refusal({"fill", {0}, {{1, 0, 0}}, {4, 4, 1, 0}, ""}), "outside of its words"));
  CHECK(contains(refusal({"fill", {0}, {{0, 1, 0}}, {4, 4, 1, 0}, ""}), "calls do not have"));
  const distflash_shape shape{1, 2, 3, 8};
  const std::string settings(reinterpret_cast<const char*>(&shape), sizeof(shape));
  CHECK(contains(refusal({"cast", std::vector<std::uint64_t>(8), {}, {1}, "short"}), "wrong size"));
  Tape tape(executor, kernels, 1,
            {{"cast", {0, 0, 0, 7, 0, 0, 0, 7}, {{0, 0, 48}, {4, 0, 16}}, {1}, settings}});
  CHECK(error_of([&] { tape.run({16}, 0); }) == "distflash_cast: not today");
  CHECK(contains(error_of([&] { tape.run({}, 0); }), "has 1 buffers, got 0"));
}

// ---- failures -------------------------------------------------------------------------------------

std::string failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "";
}

// From another thread, in the middle of a call: nobody could say which of them other ranks have first.
void test_a_tape_plays_one_call_at_a_time() {
  static Tape* played;
  static std::string inner;
  Kernels kernels;
  kernels.cast = [](const distflash_shape*, const distflash_tensor*, const distflash_tensor*,
                    std::int32_t, distflash_stream) -> const char* {
    std::thread([] { inner = failure_of([] { played->run({16}, 0); }); }).join();
    return nullptr;
  };
  auto ours = communicator(std::make_shared<HostHub>(1), 0, 5);
  auto executor = std::make_shared<Executor>(ours, plan_of(0, 1, 1, {}));
  const std::string settings(sizeof(distflash_shape), 0);
  Tape tape(executor, kernels, 1,
            {{"open", {}, {}, {0}, ""},
             {"cast", std::vector<std::uint64_t>(8), {}, {1}, settings},
             {"close", {}, {}, {}, ""}});
  played = &tape;
  CHECK(contains(failure_of([&] { tape.run({16}, 0); }), "out of step"));
  CHECK(contains(inner, "test plan before its call of the test plan had ended"));
}

// Rank 0 sends to rank 1, which sends to rank 2; the missing rank never posts.
void test_missing_rank(int missing) {
  const std::vector<Move> moves{{0, 0, 1, 0, 100}, {0, 1, 2, 0, 200}, {0, 2, 0, 0, 300}};
  auto hub = std::make_shared<HostHub>(3);
  std::atomic<int> num_failed = 0;
  const auto begun = Clock::now();
  on_all_ranks(3, [&](int rank) {
    if (rank == missing) return;
    auto ours = communicator(hub, rank, 0.3);
    Executor executor(ours, plan_of(rank, 3, 1, moves));
    std::vector<unsigned char> source(slot_bytes, 1);
    const std::string message = failure_of([&] {
      executor.begin(0);
      executor.post(0, {reinterpret_cast<std::uintptr_t>(source.data())}, 0);
      executor.wait(1, 0);
    });
    CHECK(contains(message, "rank " + std::to_string(rank)));
    CHECK(contains(message, "step 0 of the test plan"));
    CHECK(contains(message, "bytes") || contains(message, "ended"));
    CHECK(failure_of([&] { ours->check(); }) == message);
    ++num_failed;
  });
  const std::chrono::duration<double> took = Clock::now() - begun;
  CHECK(num_failed == 2);
  CHECK(took.count() < 5);
}

void test_late_rank_within_deadline() {
  const std::vector<Move> moves{{0, 0, 1, 0, 100}};
  auto hub = std::make_shared<HostHub>(2);
  on_all_ranks(2, [&](int rank) {
    auto ours = communicator(hub, rank, 20);
    Executor executor(ours, plan_of(rank, 2, 1, moves));
    std::vector<unsigned char> source(slot_bytes, 42);
    if (rank == 0) sleep_us(300000);
    executor.begin(0);
    std::vector<std::uintptr_t> sources;
    if (rank == 0) sources.push_back(reinterpret_cast<std::uintptr_t>(source.data()));
    executor.post(0, sources, 0);
    executor.finish(0);
    if (rank == 1) CHECK(*reinterpret_cast<unsigned char*>(executor.workspace()) == 42);
  });
}

// Long compute before the post is nobody's fault: the clock starts when the stream gets there.
void test_clock_starts_with_the_group() {
  const std::vector<Move> moves{{0, 0, 1, 0, 100}};
  auto hub = std::make_shared<HostHub>(2);
  on_all_ranks(2, [&](int rank) {
    auto ours = communicator(hub, rank, 0.2);
    Executor executor(ours, plan_of(rank, 2, 1, moves));
    HostStream compute;
    std::vector<unsigned char> source(slot_bytes, 1);
    compute.enqueue([] { sleep_us(600000); });
    executor.begin(compute.handle());
    std::vector<std::uintptr_t> sources;
    if (rank == 0) sources.push_back(reinterpret_cast<std::uintptr_t>(source.data()));
    executor.post(0, sources, compute.handle());
    executor.finish(compute.handle());
    compute.synchronize();
    ours->check();
  });
}

void test_disagreement_about_size() {
  auto hub = std::make_shared<HostHub>(2);
  on_all_ranks(2, [&](int rank) {
    auto ours = communicator(hub, rank, 20);
    Executor executor(ours, plan_of(rank, 2, 1, {{0, 0, 1, 0, rank == 0 ? 100 : 101}}));
    std::vector<unsigned char> source(slot_bytes, 1);
    const std::string message = failure_of([&] {
      executor.begin(0);
      std::vector<std::uintptr_t> sources;
      if (rank == 0) sources.push_back(reinterpret_cast<std::uintptr_t>(source.data()));
      executor.post(0, sources, 0);
      executor.finish(0);
      while (true) {  // the sender may have been let go before the watchdog looked
        ours->check();
        sleep_us(1000);
      }
    });
    CHECK(contains(message, "disagree about the size") || contains(message, "ended"));
  });
}

void test_calls_do_not_interleave() {
  auto hub = std::make_shared<HostHub>(1);
  auto ours = communicator(hub, 0, 5);
  Executor first(ours, plan_of(0, 1, 1, {}));
  Executor second(ours, plan_of(0, 1, 1, {}));
  first.begin(0);
  CHECK(contains(failure_of([&] { second.begin(0); }), "out of step"));
  CHECK(contains(failure_of([&] { first.post(0, {}, 0); first.finish(0); }), "out of step"));
}

// As NCCL may: the post itself blocks until the abort.
class BlockingTransport final : public Transport {
 public:
  const char* name() const override { return "blocking"; }
  void enqueue(const Group&, const Addresses&, Stream, const std::function<void()>&) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_aborted_; });
    throw std::runtime_error("let go");
  }
  std::optional<std::string> asynchronous_error() override { return std::nullopt; }
  std::vector<const Transfer*> pending(const Group& group) override {
    return {&group.transfers[0]};
  }
  void abort(const std::string&) override {
    std::lock_guard lock(mutex_);
    is_aborted_ = true;
    changed_.notify_all();
  }
  void close(double) override {}

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_aborted_ = false;
};

void test_a_post_that_blocks_has_a_deadline() {
  auto ours = std::make_shared<Communicator>(0, 2, 0.2, std::make_unique<HostDevice>(),
                                             std::make_unique<BlockingTransport>());
  Executor executor(ours, plan_of(0, 2, 1, {{0, 1, 0, 0, 100}}));
  executor.begin(0);
  const std::string message = failure_of([&] { executor.post(0, {}, 0); });
  CHECK(contains(message, "no end after 0.2 s of receiving bytes from 1 (100 bytes), peer rank 1"));
}

// An abort that is over before the post comes to enqueue its group.
class OvertakenTransport final : public Transport {
 public:
  std::function<void()> fail;
  bool is_stuck = false;

  const char* name() const override { return "overtaken"; }
  void enqueue(const Group&, const Addresses&, Stream, const std::function<void()>&) override {
    fail();
    is_stuck = true;
  }
  std::optional<std::string> asynchronous_error() override { return std::nullopt; }
  std::vector<const Transfer*> pending(const Group&) override { return {}; }
  void abort(const std::string&) override { is_stuck = false; }
  void close(double) override {}
};

void test_an_abort_ends_what_is_posted_meanwhile() {
  auto transport = std::make_unique<OvertakenTransport>();
  OvertakenTransport& overtaken = *transport;
  auto ours = std::make_shared<Communicator>(0, 2, 5, std::make_unique<HostDevice>(),
                                             std::move(transport));
  overtaken.fail = [&] { ours->fail("the peer is gone"); };
  Executor executor(ours, plan_of(0, 2, 1, {{0, 1, 0, 0, 100}}));
  executor.begin(0);
  CHECK(failure_of([&] { executor.post(0, {}, 0); }) == "the peer is gone");
  CHECK(!overtaken.is_stuck);
}

// Closing with a transfer that never ends takes the patience, not the deadline.
void test_close_aborts_what_is_stuck() {
  auto hub = std::make_shared<HostHub>(2);
  auto ours = communicator(hub, 0, 600);
  Executor executor(ours, plan_of(0, 2, 1, {{0, 1, 0, 0, 100}}));
  HostStream compute;
  executor.begin(compute.handle());
  executor.post(0, {}, compute.handle());
  executor.wait(1, compute.handle());
  const auto begun = Clock::now();
  ours->close(0.2);
  const std::chrono::duration<double> took = Clock::now() - begun;
  CHECK(took.count() < 10);
  CHECK(contains(failure_of([&] { ours->check(); }), "closed while transfers were in flight"));
}

void test_plans_are_checked() {
  const Part part{8, 0, 0};
  const auto refuses = [&](Transfer transfer) {
    try {
      make_rank_plan("test", 0, 2, 1, 8, {std::move(transfer)});
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refuses({0, 1, Side::send, 1, "good", {part}}));
  CHECK(refuses({1, 2, Side::send, 1, "step", {part}}));
  CHECK(refuses({0, 0, Side::send, 1, "needed", {part}}));
  CHECK(refuses({0, 1, Side::send, 0, "itself", {part}}));
  CHECK(refuses({0, 1, Side::send, 2, "peer", {part}}));
  CHECK(refuses({0, 1, Side::send, 1, "nothing", {}}));
  CHECK(refuses({0, 1, Side::receive, 1, "outside", {{8, 1, 0}}}));
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  test_plans_are_checked();
  for (int num_ranks = 1; num_ranks <= 8; ++num_ranks) test_delivery(num_ranks, seed + num_ranks);
  for (int num_ranks : {1, 2, 4}) {
    for (bool is_late : {false, true}) test_tape(num_ranks, is_late, seed + num_ranks);
  }
  test_tapes_are_checked();
  test_late_rank_within_deadline();
  test_clock_starts_with_the_group();
  test_disagreement_about_size();
  test_calls_do_not_interleave();
  test_a_tape_plays_one_call_at_a_time();
  test_close_aborts_what_is_stuck();
  test_a_post_that_blocks_has_a_deadline();
  test_an_abort_ends_what_is_posted_meanwhile();
  for (int missing = 0; missing < 3; ++missing) test_missing_rank(missing);
  std::printf("ok\n");
}
