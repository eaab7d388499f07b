#include "board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

namespace distflash {

struct Board::Page {
  enum State : int { blank, being_written, posted };
  std::atomic<int> state;
  char reason[1020];  // ends with a zero
};

namespace {

constexpr std::size_t page_bytes = 4096;

[[noreturn]] void give_up(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

Board::Board() {
  static_assert(sizeof(Page) <= page_bytes && std::atomic<int>::is_always_lock_free);
  // No name in any file system: what is left of a process that was killed is nothing.
  file_ = memfd_create("distflash", MFD_CLOEXEC);
  if (file_ == -1) give_up("no memory to share between processes");
  void* page = MAP_FAILED;
  if (ftruncate(file_, page_bytes) == 0) {
    page = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  }
  if (page == MAP_FAILED) {
    close(file_);
    give_up("no memory to share between processes");
  }
  own_ = new (page) Page{};
}

Board::~Board() {
  for (const auto& [peer, page] : peers_) munmap(page, page_bytes);
  munmap(own_, page_bytes);
  close(file_);
}

std::string Board::handle() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_);
}

void Board::add(int peer, const std::string& handle) {
  const std::string whose = "the memory that rank " + std::to_string(peer) + " shares";
  const int file = open(handle.c_str(), O_RDWR | O_CLOEXEC);
  if (file == -1) give_up((whose + " cannot be opened").c_str());
  void* page = mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page == MAP_FAILED) give_up((whose + " cannot be mapped").c_str());
  peers_[peer] = static_cast<Page*>(page);
}

void Board::post(const std::string& reason) {
  int expected = Page::blank;
  if (!own_->state.compare_exchange_strong(expected, Page::being_written)) return;
  std::strncpy(own_->reason, reason.c_str(), sizeof(own_->reason) - 1);
  own_->state.store(Page::posted, std::memory_order_release);
}

std::optional<std::string> Board::read() const {
  for (const auto& [peer, page] : peers_) {
    if (page->state.load(std::memory_order_acquire) == Page::posted) {
      return std::string(page->reason, strnlen(page->reason, sizeof(page->reason)));
    }
  }
  return std::nullopt;
}

bool Board::have_all_posted() const {
  for (const auto& [peer, page] : peers_) {
    if (page->state.load(std::memory_order_acquire) != Page::posted) return false;
  }
  return true;
}

}  // namespace distflash
