// The ranks of one host that share memory, and their collectives.
//
// Every operation has a generation, which is the same on all ranks because all make the same calls, and uses slot
// generation % slots. A rank *begins* an operation by writing its call and counting itself in. The last rank to arrive compares the
// calls; it does small work alone and opens large work to all. A rank *finishes* an operation by taking chunks while there are
// any, first of its own slice, then of others, and sleeps until the last chunk is done. A rank that has arrived and works
// on no chunk holds up no other.
//
// A rank begins operation g only after it has finished g - 1. For g - 1 to complete, all ranks had begun it, so all had finished
// g - 2: the slot of g - 2 can be reused.
//
// A compare-and-swap of the slot's state settles once whether an operation succeeded or failed, so all ranks agree.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adam.hpp"
#include "lars.hpp"
#include "layout.hpp"
#include "segment.hpp"

namespace phalanx {

// Details of the last call that did not return `ok`.
struct Failure {
    Status status = Status::ok;
    int author = -1;              // the rank that noticed
    std::vector<int> dead, late;  // ranks
    std::vector<Call> calls;      // of all ranks, if they disagree
    std::string refusal;
};

struct Arena {
    std::uint32_t id = 0;
    std::shared_ptr<Segment> segment;
    std::size_t bytes = 0;   // of one rank's part
    std::size_t stride = 0;  // from part to part; 0 if all ranks share one part

    char* part(int rank) const { return segment->data() + stride * static_cast<std::size_t>(rank); }
};

using Generation = std::uint64_t;

int forks();  // number of forks since the first process; asking the kernel for the pid would cost 0.3 us

// Sizes at which an operation takes another path. Python sees them (module.cpp); the tests try each, one less and one more.
constexpr std::size_t chunk_bytes = 64 << 10;   // 16 to 256 KiB measured the same; fits any L2 with several ranks
constexpr std::size_t small_bytes = 16 << 10;   // of all ranks together; below, helpers cost more than they gain
constexpr std::size_t staging_bytes = 2 << 20;  // for all ranks together; fits two cores' caches beside the tensors
constexpr std::size_t smallest_third = 64 << 10, largest_third = 128 << 10;
// Each for itself: 2 ranks read no more than in slices, and for small tensors the extra meeting of slices dominates.
constexpr int few_ranks = 2;
constexpr std::size_t few_bytes = 128 << 10;  // of all ranks together
std::size_t third_bytes(int size);
// A tensor of at most this many bytes is all-reduced in one piece, so with one meeting: threads that share their cores with computing
// threads take milliseconds to meet. Longer tensors are faster in pieces that stay in the caches: 4 MiB on 2 ranks took 430 us in
// pieces and 900 in one, 1 MiB 111 and 104. The first bucket of torch's DistributedDataParallel is slightly over 1 MiB.
constexpr std::size_t widest_third = 5 << 18, all_wide_thirds = 32 << 20;
std::size_t whole_bytes(int size);

// A fused update's sums of squares for a chunk of an adapted tensor.
struct ChunkSquares {
    double g, w;   // of the mean gradient; of the parameters as the last update left them
    double found;  // of the parameters as the last update found them
};
constexpr std::size_t chunk_elements = 16 << 10;  // 64 KiB of each: gradients of all ranks, parameters and velocities fit an L2

// A fused update. The buffers are flat float32 of one layout, which `rows` describes tensor by tensor.
struct FusedUpdate {
    const float* gradients;          // in an arena; they are only read
    float *parameters, *velocities;  // in memory shared by all ranks, as are the squares
    ChunkSquares* squares;           // one per chunk of each tensor, in order; null if no tensor is adapted
    bool carry;                      // whether `squares` are from the last update
    const TensorRow* rows;
    std::size_t tensors;
    double scale;
};

// The same for Adam, with two moments per parameter, in memory shared by all ranks.
struct FusedAdam {
    const float* gradients;
    float *parameters, *first, *second;
    const AdamRow* rows;
    std::size_t tensors;
    double scale;
};

class Team {
  public:
    static std::size_t control_bytes(int size);

    // Enter: publish this process to the others. Call `meet` when all have entered.
    Team(std::shared_ptr<Segment> control, int rank, int size);
    void meet();
    void leave();

    // Whether this process is a child of the one that entered: it must not act for its parent.
    bool forked() const { return forks() != forks_; }

    int rank() const { return rank_; }
    int size() const { return size_; }
    Segment& control() { return *control_; }
    const Failure& failure() const { return failure_; }

    void set_timeout(double seconds) { timeout_ns_ = static_cast<std::int64_t>(seconds * 1e9); }
    void set_method(Method method) { method_ = method; }
    // Pass long tensors in pieces of `whole_bytes`: more cache misses, but far fewer meetings. All ranks set it.
    void set_long_pieces() { long_pieces_ = true; }
    // Called about every 50 ms of waiting, with nothing locked; returns whether to give up.
    void set_interrupt(std::function<bool()> interrupt) { interrupt_ = std::move(interrupt); }
    void abort() { aborted_.store(true); }  // from any thread
    // Set the digest of the topic of the calls that follow; ranks with different digests disagree.
    void set_topic(std::uint64_t topic) { topic_ = topic; }

    // Collective: allocate memory that all ranks map. The id is the same on all ranks.
    Status allocate(std::size_t bytes, bool one_for_all, Arena& arena);
    Status release(std::uint32_t id);
    void adopt(const Arena& arena) { arenas_.push_back(arena); }  // of ranks that are threads of one process
    bool owns(const void* x, std::size_t bytes) const;

    // In place. Part r of n elements in `size` parts is [r * n / size, (r + 1) * n / size).
    Status all_reduce(void* x, std::size_t count, Type type, Op op, double scale);
    // The same, but returns `begun` if some rank has not arrived within `patience_ns`. The next call of this team must then be an
    // all_reduce of the same tensor, in any thread: it finishes the operation (two_calls.cpp).
    Status all_reduce_or_begin(void* x, std::size_t count, Type type, Op op, double scale, std::int64_t patience_ns);
    Status reduce_scatter(void* x, std::size_t count, Type type, Op op, double scale);  // reduces part `rank`, leaves the rest
    Status all_gather(void* x, std::size_t count, Type type);                           // part r comes from rank r
    Status broadcast(void* x, std::size_t count, Type type, int root);
    Status barrier();

    // Update the one copy of the parameters that all ranks share by the sum of their gradients.
    Status update(const FusedUpdate& what);
    Status update(const FusedAdam& what);

  private:
    struct Plan;
    struct SgdPlan;
    struct AdamPlan;

    Slot& slot(Generation g) { return slots_[g % slots]; }
    Line& row(Generation g, int rank) { return lines_[(g % slots) * static_cast<std::size_t>(size_) + rank]; }
    static std::uint32_t use(Generation g) { return static_cast<std::uint32_t>(g / slots) & 0x1FFFFFFF; }
    static std::uint32_t state_of(Generation g, Phase phase) { return use(g) << 3 | static_cast<std::uint32_t>(phase); }
    static Phase phase_of(Generation g, std::uint32_t state) {
        return state >> 3 == use(g) ? static_cast<Phase>(state & 7) : Phase::gathering;
    }

    Status begin(const Call& call, Generation& g);
    Status finish(Generation g);
    Status sync(const Call& call);  // begin and finish
    bool all_come_within(Generation g, std::int64_t nanoseconds);
    void arrive_last(Generation g, const Call& call);
    bool settle(Generation g, Phase from, Phase to);
    void help(Generation g);

    struct Cut {  // how the work is divided
        std::size_t elements, per_chunk;
        std::uint32_t chunks;  // 0: the last rank to arrive does it alone
    };
    Cut cut(const Call& call) const;
    void work(const Call& call, std::size_t first, std::size_t last);
    void work_on_arena(const Call& call, std::size_t first, std::size_t last);

    struct Range;
    Status on_stage(const Call& call, char* x);
    Status copy_on_stage(const Call& call, char* x);
    Status reduce_parts(const Call& call, char* x);
    Status reduce_each_for_itself(const Call& call, char* x);
    Status reduce_in_slices(const Call& call, char* x);
    template <class After>
    Status take_steps(Call call, std::uint32_t steps, After after);
    Range part_of(const Call& call, int rank) const;
    Range piece_of(const Call& call, const Range& whole, std::uint32_t k) const;
    std::uint32_t pieces_of(const Call& call, std::size_t elements) const;
    std::size_t per_piece(const Call& call) const;
    // where a rank puts piece k of the next call on the stage
    char* stage(int rank, std::uint32_t k) const {
        return staging_ + (thirds * static_cast<std::size_t>(rank) + (stage_steps_ + k) % thirds) * whole_;
    }

    Status pass(Plan& plan, Call& call, Verb verb);
    Status adapt(SgdPlan& plan, Call& call, const FusedUpdate& what);
    void work_on_plan(const Call& call, std::size_t first, std::size_t last);
    Status reduce(Verb verb, void* x, std::size_t count, Type type, Op op, double scale);
    bool locate(const void* x, std::size_t bytes, Call& call) const;
    bool locate_one_for_all(const void* x, std::size_t bytes, std::uint64_t& place) const;
    const Arena& arena(std::uint32_t id) const;

    // Failure.
    Status look_around(Generation g, std::int64_t waited_ns);
    Status give_up(const Generation* g, const Report& report);
    Status adopt_failure();
    Status disagreement(Generation g);
    RankSet missing(Generation g);
    Status record(const Report& report, int author);
    Status refuse(const std::string& why);

    std::shared_ptr<Segment> control_;
    int rank_, size_;
    Header* header_;
    Member* members_;
    Slot* slots_;
    Line* lines_;
    char* staging_;
    std::size_t third_, whole_;  // bytes of a piece of a long tensor, and of a third of the stage: of a shorter one or a long piece

    Method method_ = Method::memfd;
    int ranks_per_core_ = max_ranks;  // rounded up
    int helpers_ = 1;  // ranks to wake for large work, besides the one that opens it
    std::int64_t timeout_ns_ = 60'000'000'000;
    std::function<bool()> interrupt_;
    std::atomic<bool> aborted_{false};
    Watchman watchman_;

    int forks_ = forks();
    std::uint64_t topic_ = 0;
    Generation next_ = slots;  // use 0 of each slot is its initial zero state
    bool under_way_ = false;   // whether operation next_ - 1 has begun and not finished
    bool long_pieces_ = false;
    bool ahead_ = false;       // whether the first meeting of the next call has begun already
    std::int64_t patience_ns_ = -1;  // of the next meeting; -1: no limit but the timeout
    std::uint32_t stage_steps_ = 0;
    std::vector<Arena> arenas_;
    std::uint32_t next_arena_ = 1;
    Plan* plan_ = nullptr;  // of the running update
    Failure failure_;
    bool broken_ = false;
};

}  // namespace phalanx
