// A piece of memory that several processes map, and that no file system remembers.
//
// One process creates it and tells the others its place; once all have mapped it the creator forgets the place, and the kernel
// frees the memory with the last process that has it mapped, however that process ends.
//
// A place comes from another process, and perhaps from a stranger. So it holds numbers and never a path, and a process maps
// nothing before it has looked: a regular file of its own user, of exactly this size, which cannot shrink under it (a memfd is
// sealed), and which begins with the random number that the place names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unistd.h>

namespace phalanx {

enum class Method : int {
    memfd = 0,  // no name anywhere; others open /proc/<pid>/fd/<n>
    named = 1,  // a file in /dev/shm, for where /proc/<pid>/fd is closed to us; it has a name until all have mapped it
};

struct SegmentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Nonce {
    std::uint64_t words[2];
};

// Where a segment can be opened, and how to recognise it.
struct Place {
    Method method = Method::memfd;
    int pid = 0;  // of its creator
    int fd = -1;  // there, of a memfd
    Nonce nonce{};

    std::string text() const;                       // "memfd:4711:12:<32 hex digits>" or "named:4711:0:<32 hex digits>"
    static Place parse(const std::string& text);  // throws SegmentError
    std::string path() const;
};

class Segment {
  public:
    // Both throw SegmentError with the reason.
    static std::shared_ptr<Segment> create(std::size_t bytes, Method method);
    static std::shared_ptr<Segment> open(const Place& place, std::size_t bytes);

    // Memory of this process and its future children only.
    static std::shared_ptr<Segment> anonymous(std::size_t bytes);

    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    const Place& place() const { return place_; }

    // All have mapped it: it cannot be opened from now on, and at the creator its first bytes become zeros as the others are.
    void forget_place();

    // Have pages ready before they are needed: a page fault in the middle of a collective delays all ranks.
    void populate(std::size_t offset, std::size_t bytes) const;

  private:
    Segment(char* data, std::size_t bytes, int fd, const Place& place) : data_(data), bytes_(bytes), fd_(fd), place_(place) {}

    char* data_;
    std::size_t bytes_;
    int fd_;  // open only at the creator, and only until the place is forgotten
    Place place_;
    int process_ = getpid();  // a forked child removes no name
};

std::size_t round_to_pages(std::size_t bytes);

}  // namespace phalanx
