#include "wait.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace phalanx {
namespace {

constexpr std::int64_t spin_ns = 20'000;
constexpr int pauses_between_looks_at_the_clock = 16;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

// Read the state letter and start time of a process; false if the pid does not exist.
bool look_up(std::int32_t pid, char& state, std::uint64_t& started) {
    char path[32], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return false;
    const std::size_t got = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[got] = 0;
    const char* at = std::strrchr(text, ')');  // the name before it may contain spaces and parentheses
    if (at == nullptr || at[1] != ' ') return false;
    state = at[2];
    unsigned long long ticks = 0;
    // field 22, where `state` is field 3
    return std::sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) == 1 &&
           (started = ticks, true);
}

bool is_dead(const Process& process) {
    char state = 0;
    std::uint64_t started = 0;
    if (!look_up(process.pid, state, started)) return true;
    return state == 'Z' || state == 'X' || started != process.started;
}

bool is_another(const Process& process) {
    char state = 0;
    std::uint64_t started = 0;
    return look_up(process.pid, state, started) && started != process.started;
}

}  // namespace

std::int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void futex_wait(Word& word, std::uint32_t expected, std::int64_t nanoseconds) {
    const timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
    // not FUTEX_PRIVATE: the word is shared between processes
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake(Word& word, int sleepers) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, sleepers, nullptr, nullptr, 0);
}

bool Patience::passes() {
    if (spins_) {
        pause_briefly();
        if (++pauses_ % pauses_between_looks_at_the_clock == 0) {
            const std::int64_t now = now_ns();
            if (spun_since_ == 0) spun_since_ = now;
            spins_ = now - spun_since_ < spin_ns;
        }
        return true;
    }
    if (yields_left_ == 0) return false;
    --yields_left_;
    sched_yield();
    return true;
}

Process Process::self() {
    Process me;
    me.pid = static_cast<std::int32_t>(getpid());
    char state = 0;
    look_up(me.pid, state, me.started);
    return me;
}

void Watchman::watch(const std::vector<Process>& processes) {
    processes_ = processes;
    for (const Process& process : processes) {
        const int fd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
        const bool none = fd < 0 && errno == ESRCH;
        pidfds_.push_back(fd);
        // checked only now: the pid may have been reused before we opened it
        dead_at_once_.push_back(none || is_another(process));
    }
}

std::vector<int> Watchman::dead() {
    std::vector<pollfd> ends;
    for (int fd : pidfds_) ends.push_back({fd, POLLIN, 0});  // poll skips negative ones
    poll(ends.data(), ends.size(), 0);
    std::vector<int> found;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
        const bool ended = pidfds_[i] >= 0 ? (ends[i].revents & POLLIN) != 0 : is_dead(processes_[i]);
        if (ended || dead_at_once_[i]) found.push_back(static_cast<int>(i));
    }
    return found;
}

Watchman::~Watchman() {
    for (int fd : pidfds_)
        if (fd >= 0) close(fd);
}

}  // namespace phalanx
