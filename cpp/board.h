// Where the ranks of a node leave word that they gave up: a page of each rank's in memory that their
// processes share. Reading it costs a host nothing, and needs no GPU that may be stuck.
#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <string>

namespace distflash {

class Board {
 public:
  // This rank's page. Throws std::runtime_error if there is no memory to share.
  Board();
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // How peers find the page, as long as this process lives and the board does.
  std::string handle() const;
  // Maps a peer's page. Throws std::runtime_error if that cannot be done.
  void add(int peer, const std::string& handle);

  // The first reason stays.
  void post(const std::string& reason);
  // What a peer posted.
  std::optional<std::string> read() const;
  bool have_all_posted() const;

 private:
  struct Page;

  int file_ = -1;
  Page* own_ = nullptr;
  std::map<int, Page*> peers_;
};

}  // namespace distflash
