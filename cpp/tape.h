// A rank's whole walk over a plan as one call: every kernel launch, copy and transfer in order, with
// the addresses of the call's tensors filled in. Python writes a tape down once (runtime/tape.py) and
// then stays out of the way: between the first launch and the last nothing but this runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../kernels/api.h"
#include "executor.h"

namespace distflash {

// The functions of the kernels' library that a tape may call.
struct Kernels {
  decltype(&distflash_forward) forward = nullptr;
  decltype(&distflash_backward) backward = nullptr;
  decltype(&distflash_merge) merge = nullptr;
  decltype(&distflash_finish) finish = nullptr;
  decltype(&distflash_delta) delta = nullptr;
  decltype(&distflash_accumulate) accumulate = nullptr;
  decltype(&distflash_cast) cast = nullptr;
};

// Where a pointer of a note goes: the address of a call's buffer, and so many bytes behind it.
struct Pointer {
  int word;
  int buffer;
  std::int64_t offset_bytes;
};

// One thing to do.
//
//   kind                words                    numbers              settings
//   forward, backward   the tasks                [number of tasks]    distflash_options
//   a row kernel        its views                [dtype]              distflash_shape
//   copy                [to, from]               [row bytes and block bytes of to, of from,
//                                                 extent's bytes, rows, blocks]
//   fill                [rows]                   [row bytes, extent's bytes, rows, word]
//   open                what the step sends      [step]
//   close               -                        -
struct Note {
  std::string kind;
  std::vector<std::uint64_t> words;
  std::vector<Pointer> pointers;
  std::vector<std::int64_t> numbers;
  std::string settings;
};

class Tape {
 public:
  // Throws std::invalid_argument for what cannot be done.
  Tape(std::shared_ptr<Executor> executor, Kernels kernels, int num_buffers,
       std::vector<Note> notes);

  // ``buffers``: the addresses of this call's. Throws std::runtime_error with a kernel's sentence,
  // and CommunicationError, as the running call does, when another thread is inside.
  void run(const std::vector<std::uintptr_t>& buffers, Stream compute);

 private:
  struct Entry {
    void (Tape::*perform)(Note& note, Stream compute);
    Note note;
  };
  void forward(Note& note, Stream compute);
  void backward(Note& note, Stream compute);
  void merge(Note& note, Stream compute);
  void finish(Note& note, Stream compute);
  void delta(Note& note, Stream compute);
  void accumulate(Note& note, Stream compute);
  void cast(Note& note, Stream compute);
  void copy(Note& note, Stream compute);
  void fill(Note& note, Stream compute);
  void open(Note& note, Stream compute);
  void close(Note& note, Stream compute);

  const std::shared_ptr<Executor> executor_;
  const Kernels kernels_;
  const int num_buffers_;
  std::mutex mutex_;  // the notes' words are the running call's
  std::vector<Entry> entries_;
};

}  // namespace distflash
