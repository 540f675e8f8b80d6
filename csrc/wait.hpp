// How a rank waits for another: a short spin if every rank has a core, a few yields if not, then the kernel's futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace phalanx {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is a bare 32-bit word");

std::int64_t now_ns();  // monotonic

// Sleep until `word` differs from `expected`, another process wakes us, or the time is up; may also return spuriously.
void futex_wait(Word& word, std::uint32_t expected, std::int64_t nanoseconds);
void futex_wake(Word& word, int sleepers);

// What to do before sleeping. Measured on 2 cores: with a core per rank, a spin answers in 1.5 us and a futex in 30. With 8 ranks
// on 2 cores, the spin keeps the awaited rank off its core: 59 us, against 18 us with 20 yields and no spin. With two ranks per
// core, called from Python, 20 yields let every third round of calls sleep and take three times as long; with 400, one in fifty
// did. Without Python in between, 400 cost 1 to 2 us.
class Patience {
  public:
    explicit Patience(int ranks_per_core) : spins_(ranks_per_core <= 1), yields_left_(yields(ranks_per_core)) {}

    // Wait a moment and return true, or return false when it is time to sleep.
    bool passes();

  private:
    static constexpr int yields(int ranks_per_core) { return ranks_per_core <= 1 ? 100 : ranks_per_core == 2 ? 400 : 20; }

    bool spins_;
    int yields_left_;
    int pauses_ = 0;
    std::int64_t spun_since_ = 0;
};

// A process. Its start time tells it from a later one with the same pid.
struct Process {
    std::int32_t pid = 0;
    std::uint32_t reserved = 0;
    std::uint64_t started = 0;  // clock ticks after boot, from /proc/<pid>/stat

    static Process self();
};

// Detect which processes have ended: by pidfds, with one system call for all, or by /proc on kernels without them.
class Watchman {
  public:
    Watchman() = default;
    ~Watchman();
    Watchman(const Watchman&) = delete;
    Watchman& operator=(const Watchman&) = delete;

    void watch(const std::vector<Process>& processes);
    std::vector<int> dead();  // indices; a zombie is dead

  private:
    std::vector<Process> processes_;
    std::vector<int> pidfds_;  // -1 if there is none
    std::vector<bool> dead_at_once_;
};

}  // namespace phalanx
