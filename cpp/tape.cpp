#include "tape.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace distflash {

namespace {

// How many words, numbers and bytes of settings a note of a kind has; -1: any number of words.
struct Form {
  int num_words;
  int num_numbers;
  std::size_t settings_bytes;
};

constexpr int words_each = sizeof(distflash_tensor) / sizeof(std::uint64_t);
static_assert(sizeof(distflash_tensor) == sizeof(distflash_rows), "views are alike");

void check(const char* message, const char* name) {
  if (message != nullptr) throw std::runtime_error(std::string(name) + ": " + message);
}

void* stream_of(Stream compute) { return reinterpret_cast<void*>(compute); }

// A copy, because bytes may lie anywhere.
template <typename Structure>
Structure settings_of(const Note& note) {
  Structure settings;
  std::memcpy(&settings, note.settings.data(), sizeof(settings));
  return settings;
}

const distflash_tensor* tensor(const Note& note, int idx) {
  return reinterpret_cast<const distflash_tensor*>(&note.words[idx * words_each]);
}

const distflash_rows* rows(const Note& note, int idx) {
  return reinterpret_cast<const distflash_rows*>(&note.words[idx * words_each]);
}

std::int32_t number(const Note& note) { return static_cast<std::int32_t>(note.numbers[0]); }

void require(bool holds, const Note& note, const char* what) {
  if (!holds) throw std::invalid_argument("a " + note.kind + " on a tape: " + what);
}

void require_form(const Note& note, const Form& form) {
  const auto num_words = static_cast<int>(note.words.size());
  require(form.num_words == -1 || form.num_words == num_words, note, "wrong number of words");
  require(form.num_numbers == static_cast<int>(note.numbers.size()), note,
          "wrong number of numbers");
  require(form.settings_bytes == note.settings.size(), note, "settings of the wrong size");
}

}  // namespace

Tape::Tape(std::shared_ptr<Executor> executor, Kernels kernels, int num_buffers,
           std::vector<Note> notes)
    : executor_(std::move(executor)), kernels_(kernels), num_buffers_(num_buffers) {
  constexpr std::size_t options = sizeof(distflash_options), shape = sizeof(distflash_shape);
  struct Kind {
    void (Tape::*perform)(Note&, Stream);
    Form form;
    bool is_there;
  };
  const std::map<std::string, Kind> kinds{
      {"forward", {&Tape::forward, {-1, 1, options}, kernels_.forward != nullptr}},
      {"backward", {&Tape::backward, {-1, 1, options}, kernels_.backward != nullptr}},
      {"merge", {&Tape::merge, {4 * words_each, 1, shape}, kernels_.merge != nullptr}},
      {"finish", {&Tape::finish, {5 * words_each, 1, shape}, kernels_.finish != nullptr}},
      {"delta", {&Tape::delta, {3 * words_each, 1, shape}, kernels_.delta != nullptr}},
      {"accumulate",
       {&Tape::accumulate, {2 * words_each, 1, shape}, kernels_.accumulate != nullptr}},
      {"cast", {&Tape::cast, {2 * words_each, 1, shape}, kernels_.cast != nullptr}},
      {"copy", {&Tape::copy, {2, 7, 0}, true}},
      {"fill", {&Tape::fill, {1, 4, 0}, true}},
      {"open", {&Tape::open, {-1, 1, 0}, true}},
      {"close", {&Tape::close, {0, 0, 0}, true}},
  };
  for (Note& note : notes) {
    const auto kind = kinds.find(note.kind);
    require(kind != kinds.end(), note, "nobody knows how to do that");
    require(kind->second.is_there, note, "its function was not given");
    require_form(note, kind->second.form);
    for (const Pointer& pointer : note.pointers) {
      require(0 <= pointer.word && pointer.word < static_cast<int>(note.words.size()), note,
              "a pointer outside of its words");
      require(0 <= pointer.buffer && pointer.buffer < num_buffers, note,
              "a pointer into a buffer that calls do not have");
    }
    if (note.kind == "forward" || note.kind == "backward") {
      const std::size_t task = note.kind == "forward" ? sizeof(distflash_forward_task)
                                                      : sizeof(distflash_backward_task);
      require(note.words.size() * sizeof(std::uint64_t) ==
                  static_cast<std::size_t>(note.numbers[0]) * task,
              note, "not so many tasks");
    }
    entries_.push_back({kind->second.perform, std::move(note)});
  }
}

void Tape::run(const std::vector<std::uintptr_t>& buffers, Stream compute) {
  if (static_cast<int>(buffers.size()) != num_buffers_) {
    throw std::invalid_argument("a call of this tape has " + std::to_string(num_buffers_) +
                                " buffers, got " + std::to_string(buffers.size()));
  }
  std::unique_lock lock(mutex_, std::try_to_lock);
  // To wait would hide that nobody says in which order the ranks' threads come.
  if (!lock) executor_->refuse_call();
  for (auto& [perform, note] : entries_) {
    for (const Pointer& pointer : note.pointers) {
      note.words[pointer.word] = buffers[pointer.buffer] + pointer.offset_bytes;
    }
    (this->*perform)(note, compute);
  }
}

// ---- kernels --------------------------------------------------------------------------------------

void Tape::forward(Note& note, Stream compute) {
  const auto* tasks = reinterpret_cast<const distflash_forward_task*>(note.words.data());
  const auto options = settings_of<distflash_options>(note);
  check(kernels_.forward(tasks, number(note), &options, stream_of(compute)), "distflash_forward");
}

void Tape::backward(Note& note, Stream compute) {
  const auto* tasks = reinterpret_cast<const distflash_backward_task*>(note.words.data());
  const auto options = settings_of<distflash_options>(note);
  check(kernels_.backward(tasks, number(note), &options, stream_of(compute)),
        "distflash_backward");
}

void Tape::merge(Note& note, Stream compute) {
  const auto shape = settings_of<distflash_shape>(note);
  check(kernels_.merge(&shape, tensor(note, 0), rows(note, 1), tensor(note, 2), rows(note, 3),
                       number(note), stream_of(compute)),
        "distflash_merge");
}

void Tape::finish(Note& note, Stream compute) {
  const auto shape = settings_of<distflash_shape>(note);
  check(kernels_.finish(&shape, tensor(note, 0), rows(note, 1), tensor(note, 2), rows(note, 3),
                        tensor(note, 4), number(note), stream_of(compute)),
        "distflash_finish");
}

void Tape::delta(Note& note, Stream compute) {
  const auto shape = settings_of<distflash_shape>(note);
  check(kernels_.delta(&shape, tensor(note, 0), tensor(note, 1), rows(note, 2), number(note),
                       stream_of(compute)),
        "distflash_delta");
}

void Tape::accumulate(Note& note, Stream compute) {
  const auto shape = settings_of<distflash_shape>(note);
  check(kernels_.accumulate(&shape, tensor(note, 0), tensor(note, 1), number(note),
                            stream_of(compute)),
        "distflash_accumulate");
}

void Tape::cast(Note& note, Stream compute) {
  const auto shape = settings_of<distflash_shape>(note);
  check(kernels_.cast(&shape, tensor(note, 0), tensor(note, 1), number(note), stream_of(compute)),
        "distflash_cast");
}

// ---- memory and transfers -------------------------------------------------------------------------

void Tape::copy(Note& note, Stream compute) {
  const auto& n = note.numbers;
  executor_->device().copy({note.words[0], n[0], n[1]}, {note.words[1], n[2], n[3]},
                           {n[4], n[5], n[6]}, compute);
}

void Tape::fill(Note& note, Stream compute) {
  const auto& n = note.numbers;
  executor_->device().fill({note.words[0], n[0], 0}, {n[1], n[2], 1},
                           static_cast<std::uint32_t>(n[3]), compute);
}

void Tape::open(Note& note, Stream compute) {
  executor_->open_step(number(note), {note.words.begin(), note.words.end()}, compute);
}

void Tape::close(Note&, Stream compute) { executor_->close_step(compute); }

}  // namespace distflash
