#include "segment.hpp"

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels return EINVAL, and pages are mapped one at a time
#endif

namespace phalanx {
namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;  // a file that shrinks under a mapping causes SIGBUS

[[noreturn]] void fail(const std::string& what) {
    throw SegmentError(what + ": " + std::generic_category().message(errno));
}

struct Descriptor {
    int number;
    ~Descriptor() {
        if (number >= 0) close(number);
    }
    int release() {
        const int mine = number;
        number = -1;
        return mine;
    }
};

char* map(int fd, std::size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes");
    madvise(at, bytes, MADV_HUGEPAGE);  // 5-9 % at 64 MiB where /sys/.../shmem_enabled says advise; elsewhere no effect
    return static_cast<char*>(at);
}

// Check size, owner and file type, as `create` set them. A file from elsewhere differs in at least one.
void check_kind(int fd, const Place& place, std::size_t bytes) {
    struct stat found {};
    if (fstat(fd, &found) != 0) fail("fstat of " + place.path());
    const auto refuse = [&](const std::string& why) { throw SegmentError(place.path() + " is no segment of this job: " + why); };
    if (!S_ISREG(found.st_mode)) refuse("it is no regular file");
    if (found.st_uid != geteuid()) refuse("it belongs to user " + std::to_string(found.st_uid));
    if (found.st_size != static_cast<off_t>(bytes))
        refuse("it has " + std::to_string(found.st_size) + " bytes instead of " + std::to_string(bytes));
    const bool named = place.method == Method::named;
    if (found.st_nlink != (named ? 1u : 0u)) refuse("it has " + std::to_string(found.st_nlink) + " names");
    if (named && (found.st_mode & 077) != 0) refuse("other users may open it");
}

template <class Number>
bool read(std::string_view word, Number& value, int base) {
    const auto done = std::from_chars(word.data(), word.data() + word.size(), value, base);
    return done.ec == std::errc() && done.ptr == word.data() + word.size() && value >= Number{0};
}

}  // namespace

std::size_t round_to_pages(std::size_t bytes) {
    static const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

// ---- the place ---------------------------------------------------------------------------------------------------------------

std::string Place::text() const {
    char words[96];
    std::snprintf(words, sizeof words, "%s:%d:%d:%016llx%016llx", method == Method::memfd ? "memfd" : "named", pid,
                  method == Method::memfd ? fd : 0, static_cast<unsigned long long>(nonce.words[0]),
                  static_cast<unsigned long long>(nonce.words[1]));
    return words;
}

Place Place::parse(const std::string& text) {
    std::vector<std::string_view> words;
    for (std::string_view rest = text; words.size() <= 4; rest.remove_prefix(words.back().size() + 1)) {
        words.push_back(rest.substr(0, rest.find(':')));
        if (words.back().size() == rest.size()) break;
    }
    Place place;
    if (words.size() == 4 && (words[0] == "memfd" || words[0] == "named") && read(words[1], place.pid, 10) &&
        read(words[2], place.fd, 10) && words[3].size() == 32 && read(words[3].substr(0, 16), place.nonce.words[0], 16) &&
        read(words[3].substr(16), place.nonce.words[1], 16)) {
        place.method = words[0] == "memfd" ? Method::memfd : Method::named;
        return place;
    }
    throw SegmentError("another rank told something that is not the place of a segment");
}

std::string Place::path() const {
    if (method == Method::memfd) return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    char name[96];
    std::snprintf(name, sizeof name, "/dev/shm/phalanx-%d-%016llx%016llx", pid, static_cast<unsigned long long>(nonce.words[0]),
                  static_cast<unsigned long long>(nonce.words[1]));
    return name;
}

// ---- the segment -------------------------------------------------------------------------------------------------------------

std::shared_ptr<Segment> Segment::create(std::size_t bytes, Method method) {
    Place place;
    place.method = method;
    place.pid = getpid();
    if (getrandom(&place.nonce, sizeof place.nonce, 0) != sizeof place.nonce) fail("getrandom");
    const bool named = method == Method::named;
    if (named)
        place.fd = ::open(place.path().c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    else
        place.fd = memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (place.fd < 0) fail(named ? "create " + place.path() : "memfd_create");
    Descriptor fd{place.fd};
    try {
        if (ftruncate(fd.number, static_cast<off_t>(bytes)) != 0) fail("ftruncate to " + std::to_string(bytes));
        // /dev/shm has a limit, often 64 MiB in containers: fail now rather than with SIGBUS at the first touch
        if (named && (errno = posix_fallocate(fd.number, 0, static_cast<off_t>(bytes))) != 0)
            fail("reserve " + std::to_string(bytes) + " bytes in /dev/shm");
        if (!named && fcntl(fd.number, F_ADD_SEALS, seals) != 0) fail("seal a memfd");
        char* at = map(fd.number, bytes);
        std::memcpy(at, &place.nonce, sizeof place.nonce);
        return std::shared_ptr<Segment>(new Segment(at, bytes, fd.release(), place));
    } catch (...) {
        if (named) unlink(place.path().c_str());
        throw;
    }
}

std::shared_ptr<Segment> Segment::open(const Place& place, std::size_t bytes) {
    const bool named = place.method == Method::named;
    // O_PATH first: it does not open the file, so it cannot block on a fifo or wake a device. Links are followed: /proc/<pid>/fd/<n> is one.
    const Descriptor seen{::open(place.path().c_str(), O_PATH | O_CLOEXEC | (named ? O_NOFOLLOW : 0))};
    if (seen.number < 0) fail("open " + place.path());
    check_kind(seen.number, place, bytes);
    const Descriptor fd{::open(("/proc/self/fd/" + std::to_string(seen.number)).c_str(), O_RDWR | O_CLOEXEC)};
    if (fd.number < 0) fail("open " + place.path());
    if (!named) {
        const int found = fcntl(fd.number, F_GET_SEALS);
        if (found < 0 || (found & seals) != seals) throw SegmentError(place.path() + " is no segment of this job: it may shrink");
    }
    char* at = map(fd.number, bytes);
    if (std::memcmp(at, &place.nonce, sizeof place.nonce) != 0) {
        munmap(at, bytes);
        throw SegmentError(place.path() + " is no segment of this job: it does not begin with the number that was told");
    }
    return std::shared_ptr<Segment>(new Segment(at, bytes, -1, place));
}

std::shared_ptr<Segment> Segment::anonymous(std::size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes");
    return std::shared_ptr<Segment>(new Segment(static_cast<char*>(at), bytes, -1, Place{}));
}

void Segment::forget_place() {
    if (fd_ < 0) return;
    close(fd_);
    fd_ = -1;
    if (getpid() != process_) return;
    if (place_.method == Method::named) unlink(place_.path().c_str());
    std::memset(data_, 0, sizeof place_.nonce);
}

void Segment::populate(std::size_t offset, std::size_t bytes) const {
    if (bytes != 0) madvise(data_ + offset, bytes, MADV_POPULATE_WRITE);
}

Segment::~Segment() {
    forget_place();
    munmap(data_, bytes_);
}

}  // namespace phalanx
