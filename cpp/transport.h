// How the bytes of one group of transfers get from rank to rank.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"
#include "plan.h"

namespace distflash {

// Where the memory of one group lies.
struct Addresses {
  std::uintptr_t workspace = 0;
  std::vector<std::uintptr_t> peer_workspaces;  // [num_ranks], as mapped here; empty if they are not
  std::vector<std::uintptr_t> sources;          // what the group sends, part by part

  char* in_workspace(const Part& part) const {
    return reinterpret_cast<char*>(workspace + part.workspace_offset_bytes);
  }
  // What is read (sent parts) or written (received parts) on this rank.
  char* local(const Transfer& transfer, std::size_t part_idx) const {
    if (transfer.side == Side::receive) return in_workspace(transfer.parts[part_idx]);
    return reinterpret_cast<char*>(sources[transfer.first_source + part_idx]);
  }
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  // Enqueues the group on the stream; the stream goes on when everything has arrived and everything
  // sent may be overwritten. ``record_start`` is to be called where the next thing in the stream is
  // what occupies the GPU. Pairs of ranks post their common transfers in the same order. Throws
  // std::runtime_error when the transport itself refuses.
  virtual void enqueue(const Group& group, const Addresses& addresses, Stream stream,
                       const std::function<void()>& record_start) = 0;

  // What was enqueued last went into a CUDA graph, which may be replayed as long as it is there.
  virtual void note_capture() {}

  // An error that was found since, here or on a peer; nothing if there is none. Never blocks.
  virtual std::optional<std::string> asynchronous_error() = 0;

  // The transfers of the group, which is running now, that are not done, as far as is known.
  virtual std::vector<const Transfer*> pending(const Group& group) = 0;

  // Ends everything enqueued, whatever state it is in. Called from the watchdog's thread, at any
  // time, and again by a thread that was inside ``enqueue`` meanwhile.
  virtual void abort(const std::string& reason) = 0;

  // One-sided transports read the sources' workspaces, so everything sent has to lie in one, and
  // every rank maps those of the others: ``export_memory`` here, ``import_memory`` there.
  virtual bool is_one_sided() const { return false; }
  virtual std::string export_memory(void*) { throw std::logic_error("the transport maps nothing"); }
  virtual void* import_memory(const std::string&) {
    throw std::logic_error("the transport maps nothing");
  }
  virtual void unmap_memory(void*) {}
  // The same for what the transport itself maps of its peers'. Nothing is enqueued afterwards.
  virtual void unmap_peers() {}

  // Gives back what the transport owns. Nothing is in flight, or it was aborted.
  virtual void close(double deadline_s) = 0;
};

}  // namespace distflash
