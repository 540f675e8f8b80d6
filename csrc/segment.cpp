#include "segment.hpp"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fcntl.h>
#include <system_error>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels answer EINVAL, and the pages come one by one
#endif

namespace phalanx {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

char* map(int fd, std::size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, bytes, MADV_HUGEPAGE);  // 5-9 % at 64 MiB where /sys/.../shmem_enabled says advise; elsewhere no effect
    return static_cast<char*>(at);
}

// Close what was opened, remove what was named, and report the error that came first.
[[noreturn]] void undo(int fd, const std::string& name, const std::string& what) {
    const int error = errno;
    close(fd);
    if (!name.empty()) unlink(name.c_str());
    errno = error;
    fail(what);
}

}  // namespace

std::size_t round_to_pages(std::size_t bytes) {
    static const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes, Method method) {
    std::string path;
    int fd = -1;
    if (method == Method::memfd) {
        fd = memfd_create("phalanx", MFD_CLOEXEC);
        if (fd < 0) fail("memfd_create");
        path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
    } else {
        std::uint64_t salt = 0;
        if (getrandom(&salt, sizeof salt, 0) != sizeof salt) fail("getrandom");
        char name[64];
        std::snprintf(name, sizeof name, "/dev/shm/phalanx-%d-%016llx", getpid(), static_cast<unsigned long long>(salt));
        path = name;
        fd = ::open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0) fail("create " + path);
    }
    const bool named = method == Method::named;
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) undo(fd, named ? path : "", "ftruncate to " + std::to_string(bytes));
    // /dev/shm has a limit, often 64 MiB in containers: an error now rather than SIGBUS at the first touch
    if (named && (errno = posix_fallocate(fd, 0, static_cast<off_t>(bytes))) != 0)
        undo(fd, path, "reserve " + std::to_string(bytes) + " bytes in /dev/shm");
    char* at = map(fd, bytes);
    if (at == nullptr) undo(fd, named ? path : "", "mmap of " + std::to_string(bytes) + " bytes");
    return std::shared_ptr<Segment>(new Segment(at, bytes, fd, path, named));
}

std::shared_ptr<Segment> Segment::open(const std::string& path, std::size_t bytes) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) fail("open " + path);
    char* at = map(fd, bytes);
    if (at == nullptr) undo(fd, "", "mmap " + path);
    close(fd);
    return std::shared_ptr<Segment>(new Segment(at, bytes, -1, path, false));
}

std::shared_ptr<Segment> Segment::anonymous(std::size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes");
    return std::shared_ptr<Segment>(new Segment(static_cast<char*>(at), bytes, -1, "", false));
}

void Segment::forget_path() {
    if (named_ && getpid() == process_) unlink(path_.c_str());
    if (fd_ >= 0) close(fd_);
    named_ = false;
    fd_ = -1;
}

void Segment::populate(std::size_t offset, std::size_t bytes) const {
    if (bytes != 0) madvise(data_ + offset, bytes, MADV_POPULATE_WRITE);
}

Segment::~Segment() {
    forget_path();
    munmap(data_, bytes_);
}

}  // namespace phalanx
