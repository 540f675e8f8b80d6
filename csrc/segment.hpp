// A piece of memory that several processes map, and that no file system remembers.
//
// One process creates it and tells the others a path under which they can open it; once all have mapped it the creator forgets
// the path, and the kernel frees the memory with the last process that has it mapped, however that process ends.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unistd.h>

namespace phalanx {

enum class Method : int {
    memfd = 0,  // no name anywhere; others open /proc/<pid>/fd/<n>
    named = 1,  // a file in /dev/shm, for where /proc/<pid>/fd is closed to us; it has a name until all have mapped it
};

class Segment {
  public:
    // Both throw std::system_error with the reason.
    static std::shared_ptr<Segment> create(std::size_t bytes, Method method);
    static std::shared_ptr<Segment> open(const std::string& path, std::size_t bytes);

    // Memory of this process and its future children only.
    static std::shared_ptr<Segment> anonymous(std::size_t bytes);

    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    const std::string& path() const { return path_; }

    // All have mapped it: nobody can open it from now on.
    void forget_path();

    // Have pages ready before they are needed: a page fault in the middle of a collective delays all ranks.
    void populate(std::size_t offset, std::size_t bytes) const;

  private:
    Segment(char* data, std::size_t bytes, int fd, std::string path, bool named)
        : data_(data), bytes_(bytes), fd_(fd), path_(std::move(path)), named_(named) {}

    char* data_;
    std::size_t bytes_;
    int fd_;  // open only at the creator, and only until the path is forgotten
    std::string path_;
    bool named_;
    int process_ = getpid();  // a forked child removes no name
};

std::size_t round_to_pages(std::size_t bytes);

}  // namespace phalanx
