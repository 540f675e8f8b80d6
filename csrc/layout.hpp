// What lies where in the control segment. All zeros is its valid beginning, so that no rank has to prepare it; only the nonce of
// the segment (segment.hpp) stands there until all have mapped it.
//
//   Header                 which rank broke the team, and a letter box for the place of a new arena
//   Member[size]           process, cores, and what this rank found out when it gave up
//   Slot[slots]            one operation in flight each: how many have arrived, and how far it is
//   Line[slots][size]      what each rank calls, and which of its chunks are taken
//   staging                three thirds per rank, for tensors that live elsewhere
//
// Each field has one writer, or is an atomic. What one rank writes and what others poll lie on different cache lines.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "wait.hpp"

namespace phalanx {

constexpr int max_ranks = 256;
// Two would do: when a rank begins operation g, all ranks have left operation g - 2 (team.hpp). With more ranks than cores 32 are
// faster, because a rank that wakes late finds its lines untouched: 4 KiB on 4 ranks of 2 cores take 30 us, not 36.
constexpr int slots = 32;
constexpr std::size_t line = 64;  // bytes of a cache line
constexpr int thirds = 3;         // of each rank's part of the staging area (stage.cpp)
constexpr std::size_t place_bytes = 96, text_bytes = 160;

enum class Verb : std::uint8_t {
    barrier,
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    allocate,
    release,
    update,
    norms,   // of an update by LARS, before it
    repair,  // and after it
};
constexpr const char* verb_names[] = {"barrier",  "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "allocate", "release",    "update",         "norms",      "repair"};

// What a rank calls. Ranks that meet in one operation must have written the same bytes.
struct Call {
    Verb verb = Verb::barrier;
    Type type = Type::u8;
    Op op = Op::sum;
    std::uint8_t staged = 0;  // 0: in an arena; 1, 2 or 3: through that third of the staging area
    std::uint32_t root = 0;
    std::uint64_t count = 0;   // elements of the whole
    std::uint64_t offset = 0;  // bytes from the beginning of each rank's part of the arena
    std::uint32_t arena = 0;
    std::uint32_t piece = 0;  // a staged tensor passes in pieces
    double scale = 1.0;
    std::uint64_t digest = 0;  // of what else must be equal: what the call is about, the table of a fused update
};
static_assert(sizeof(Call) == 48, "compared as bytes: no padding");

struct alignas(line) Line {
    Call call;
    std::atomic<std::uint64_t> claim;  // generation << 32 | chunks of this rank's slice that are taken
    Word generation;                   // the last operation this rank has begun in this slot
    Word busy;                         // whether this rank is at work on it
};
static_assert(sizeof(Line) == line, "one cache line per rank and operation");

enum class Phase : std::uint32_t { gathering, open, done, disagreed, failed };

struct Slot {
    alignas(line) Word arrived;  // of all uses of the slot together: never reset
    alignas(line) Word state;    // use << 3 | Phase: the word that ranks sleep on
    Word sleepers;
    alignas(line) Word chunks_done;
};

enum class Status : std::uint32_t {
    ok,
    disagree,     // ranks called different things; nothing was touched, and the team is as good as before
    dead,         // a process has ended or left the team
    late,         // a rank did not come, or did not finish, in time
    aborted,      // abort() was called on some rank
    interrupted,  // a signal handler raised on some rank
    refused,      // memory could not be shared; the team is as good as before
    begun,        // no failure: some ranks have not come yet, and the same call again finishes it (two_calls.cpp)
};
constexpr const char* status_names[] = {"ok", "disagree", "dead", "late", "aborted", "interrupted", "refused", "begun"};

struct RankSet {
    std::uint64_t bits[max_ranks / 64];
    void add(int rank) { bits[rank / 64] |= std::uint64_t{1} << rank % 64; }
    bool has(int rank) const { return bits[rank / 64] >> rank % 64 & 1; }
    bool empty() const {
        for (std::uint64_t word : bits)
            if (word != 0) return false;
        return true;
    }
};

struct Report {
    Status status;
    RankSet dead, late;
};

struct alignas(line) Member {
    Process process;
    std::uint64_t cores[16];  // its affinity mask
    Word left;                // closed the team
    alignas(line) Report report;
    char refusal[text_bytes];  // why it could not map a new arena; empty if it could
};

struct alignas(line) Header {
    std::uint64_t nonce[2];    // of the segment, while it can be opened; no other rank writes here
    Word broken;               // 1 + the rank whose report says why; 0 while all is well
    char place[place_bytes];   // letter box: where to open the new arena
    char refusal[text_bytes];  // why there is none
};
static_assert(offsetof(Header, nonce) == 0, "a segment begins with its nonce");

}  // namespace phalanx
