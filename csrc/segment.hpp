// A piece of memory that several processes map and that has no name once all have mapped it.
//
// One process creates it and sends the others its place. When all have mapped it, the creator removes the place. The kernel frees
// the memory with the last process that maps it, no matter how that process ends.
//
// A place comes from another process, which may be hostile. So it holds numbers and never a path, and a process checks before it
// maps: the file must be a regular file of its own user, of exactly this size, unable to shrink (a memfd is sealed), and must
// begin with the random number that the place names.
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
    named = 1,  // a file in /dev/shm, if /proc/<pid>/fd is not accessible; unlinked once all have mapped it
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
    int fd = -1;  // of a memfd, in that process
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

    // Memory for this process and its future children only.
    static std::shared_ptr<Segment> anonymous(std::size_t bytes);

    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    const Place& place() const { return place_; }

    // Call this when all have mapped it: it can no longer be opened, and the creator zeroes the nonce.
    void forget_place();

    // Map the pages before they are needed: a page fault in the middle of a collective delays all ranks.
    void populate(std::size_t offset, std::size_t bytes) const;

  private:
    Segment(char* data, std::size_t bytes, int fd, const Place& place) : data_(data), bytes_(bytes), fd_(fd), place_(place) {}

    char* data_;
    std::size_t bytes_;
    int fd_;  // open only in the creator, until the place is removed
    Place place_;
    int process_ = getpid();  // a forked child must not unlink the file
};

std::size_t round_to_pages(std::size_t bytes);

}  // namespace phalanx
