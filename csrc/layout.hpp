// The layout of the control segment. All zeros is a valid initial state, so that no rank has to prepare it. Only the segment's
// nonce (segment.hpp) is there until all ranks have mapped it.
//
//   Header                 which rank broke the team, and a mailbox for the place of a new arena
//   Member[size]           process, cores, and what this rank reported when it gave up
//   Slot[slots]            one operation in flight: how many ranks have arrived, and its progress
//   Line[slots][size]      what each rank calls, and which of its chunks are taken
//   staging                three thirds per rank, for tensors that live elsewhere
//
// Each field has one writer, or is an atomic. What one rank writes and what others poll are on different cache lines.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "wait.hpp"

namespace phalanx {

constexpr int max_ranks = 256;
// Two would do: when a rank begins operation g, all ranks have left operation g - 2 (team.hpp). With more ranks than cores, 32 are
// faster, because a rank that wakes late still has its lines in cache: 4 KiB on 4 ranks of 2 cores take 30 us, not 36.
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
    norms,   // of a LARS update, before it
    repair,  // and after it
};
constexpr const char* verb_names[] = {"barrier",  "all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "allocate", "release",    "update",         "norms",      "repair"};

// What a rank calls. Ranks that meet in one operation must have written the same bytes.
struct Call {
    Verb verb = Verb::barrier;
    Type type = Type::u8;
    Op op = Op::sum;
    std::uint8_t staged = 0;  // 0: in an arena; 1, 2 or 3: through that third of the staging area; 4 to 6: in long pieces
    std::uint32_t root = 0;
    std::uint64_t count = 0;   // elements of the whole tensor
    std::uint64_t offset = 0;  // bytes from the beginning of each rank's part of the arena
    std::uint32_t arena = 0;
    std::uint32_t piece = 0;  // a staged tensor is processed in pieces
    double scale = 1.0;
    std::uint64_t digest = 0;  // of what else must match: the topic of the call, the table of a fused update
};
static_assert(sizeof(Call) == 48, "compared as bytes: no padding");

struct alignas(line) Line {
    Call call;
    std::atomic<std::uint64_t> claim;  // generation << 32 | chunks of this rank's slice that are taken
    Word generation;                   // the last operation that this rank began in this slot
    Word busy;                         // whether this rank is working on it
};
static_assert(sizeof(Line) == line, "one cache line per rank and operation");

enum class Phase : std::uint32_t { gathering, open, done, disagreed, failed };

struct Slot {
    alignas(line) Word arrived;  // total over all uses of the slot; never reset
    alignas(line) Word state;    // use << 3 | Phase: the word that ranks sleep on
    Word sleepers;
    alignas(line) Word chunks_done;
};

enum class Status : std::uint32_t {
    ok,
    disagree,     // ranks made different calls; no data was touched, and the team still works
    dead,         // a process has ended or left the team
    late,         // a rank did not arrive, or did not finish, in time
    aborted,      // abort() was called on some rank
    interrupted,  // a signal handler raised on some rank
    refused,      // memory could not be shared; the team still works
    begun,        // no failure: some ranks have not arrived yet; repeat the call to finish it (two_calls.cpp)
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
    Word left;                // this rank closed the team
    alignas(line) Report report;
    char refusal[text_bytes];  // why it could not map a new arena; empty if it could
};

struct alignas(line) Header {
    std::uint64_t nonce[2];    // of the segment, while it can be opened; only the creator writes it
    Word broken;               // 1 + the rank whose report has the reason; 0 while the team works
    char place[place_bytes];   // mailbox: where to open the new arena
    char refusal[text_bytes];  // why rank 0 could not create it
};
static_assert(offsetof(Header, nonce) == 0, "a segment begins with its nonce");

}  // namespace phalanx
