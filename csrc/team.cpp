// One operation, from arrival to the last chunk. See also failure.cpp, stage.cpp (memory outside the arenas) and arena.cpp.
#include "team.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <pthread.h>
#include <sched.h>

namespace phalanx {
namespace {

constexpr std::int64_t look_every_ns = 50'000'000;

int fork_count = 0;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++fork_count; });

bool of_an_update(Verb verb) { return verb == Verb::update || verb == Verb::norms || verb == Verb::repair; }

constexpr std::size_t up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

}  // namespace

std::size_t third_bytes(int size) {
    return std::clamp(up(staging_bytes / (thirds * static_cast<std::size_t>(size)), 4096), smallest_third, largest_third);
}

std::size_t whole_bytes(int size) {
    return std::clamp(all_wide_thirds / (thirds * static_cast<std::size_t>(size)) / 4096 * 4096, third_bytes(size), widest_third);
}

int forks() { return fork_count; }

std::size_t Team::control_bytes(int size) {
    const std::size_t n = static_cast<std::size_t>(size);
    const std::size_t books = sizeof(Header) + n * sizeof(Member) + slots * (sizeof(Slot) + n * sizeof(Line));
    return up(books, 4096) + n * thirds * whole_bytes(size);
}

Team::Team(std::shared_ptr<Segment> control, int rank, int size)
    : control_(std::move(control)), rank_(rank), size_(size), third_(third_bytes(size)), whole_(whole_bytes(size)) {
    char* at = control_->data();
    header_ = reinterpret_cast<Header*>(at);
    members_ = reinterpret_cast<Member*>(header_ + 1);
    slots_ = reinterpret_cast<Slot*>(members_ + size);
    lines_ = reinterpret_cast<Line*>(slots_ + slots);
    staging_ = at + up(reinterpret_cast<char*>(lines_ + static_cast<std::size_t>(slots) * size) - at, 4096);

    Member& me = members_[rank];
    me.process = Process::self();
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) std::memcpy(me.cores, &cores, std::min(sizeof me.cores, sizeof cores));
}

void Team::meet() {
    std::vector<Process> processes;
    std::uint64_t all[16] = {};
    for (int r = 0; r < size_; ++r) {
        processes.push_back(members_[r].process);
        for (int i = 0; i < 16; ++i) all[i] |= members_[r].cores[i];
    }
    int cores = 0;  // of all ranks together: ranks pinned to one core each do not share
    for (std::uint64_t word : all) cores += __builtin_popcountll(word);
    ranks_per_core_ = (size_ + cores - 1) / std::max(1, cores);
    helpers_ = std::max(1, std::min(size_, cores) - 1);
    watchman_.watch(processes);
}

void Team::leave() {
    if (forked()) return;  // a forked child's copy: the rank itself is still there
    members_[rank_].left.store(1);
    arenas_.clear();
}

// ---- the calls ---------------------------------------------------------------------------------------------------------------

Status Team::reduce(Verb verb, void* x, std::size_t count, Type type, Op op, double scale) {
    if (size_ == 1) {
        const void* from = x;
        const Reduce reduce = kernels().reduce[static_cast<int>(type)][static_cast<int>(op)];
        if (scale != 1.0 && count != 0) reduce(&x, 1, &from, 1, count, scale);
        return Status::ok;
    }
    Call call;
    call.verb = verb;
    call.type = type;
    call.op = op;
    call.count = count;
    call.scale = scale;
    return locate(x, count * size_of(type), call) ? sync(call) : on_stage(call, static_cast<char*>(x));
}

Status Team::all_reduce(void* x, std::size_t count, Type type, Op op, double scale) {
    return reduce(Verb::all_reduce, x, count, type, op, scale);
}

Status Team::reduce_scatter(void* x, std::size_t count, Type type, Op op, double scale) {
    return reduce(Verb::reduce_scatter, x, count, type, op, scale);
}

Status Team::all_gather(void* x, std::size_t count, Type type) { return reduce(Verb::all_gather, x, count, type, Op::sum, 1.0); }

Status Team::broadcast(void* x, std::size_t count, Type type, int root) {
    if (size_ == 1) return Status::ok;
    Call call;
    call.verb = Verb::broadcast;
    call.type = type;
    call.count = count;
    call.root = static_cast<std::uint32_t>(root);
    return locate(x, count * size_of(type), call) ? sync(call) : on_stage(call, static_cast<char*>(x));
}

Status Team::barrier() { return size_ == 1 ? Status::ok : sync(Call{}); }

// ---- begin -------------------------------------------------------------------------------------------------------------------

Status Team::begin(const Call& call, Generation& g) {
    if (broken_) return failure_.status;
    if (header_->broken.load(std::memory_order_acquire) != 0) return adopt_failure();
    if (aborted_.load(std::memory_order_relaxed)) return give_up(nullptr, Report{Status::aborted, {}, {}});

    g = next_++;
    under_way_ = true;
    Line& mine = row(g, rank_);
    mine.call = call;
    mine.call.digest ^= topic_;
    mine.claim.store(g << 32, std::memory_order_relaxed);
    mine.generation.store(static_cast<std::uint32_t>(g), std::memory_order_relaxed);
    const std::uint32_t before = slot(g).arrived.fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == static_cast<std::uint32_t>(g / slots) * static_cast<std::uint32_t>(size_)) arrive_last(g, mine.call);
    return Status::ok;
}

void Team::arrive_last(Generation g, const Call& call) {
    for (int r = 0; r < size_; ++r)
        if (std::memcmp(&row(g, r).call, &call, sizeof call) != 0) {
            settle(g, Phase::gathering, Phase::disagreed);
            return;
        }
    const Cut whole = cut(call);
    if (whole.chunks == 0) {
        Line& mine = row(g, rank_);
        mine.busy.store(1, std::memory_order_relaxed);
        if (whole.elements != 0) work(call, 0, whole.elements);
        mine.busy.store(0, std::memory_order_relaxed);
        settle(g, Phase::gathering, Phase::done);
    } else {
        slot(g).chunks_done.store(0, std::memory_order_relaxed);
        settle(g, Phase::gathering, Phase::open);
    }
}

// Advance the state, unless another rank has changed it, and wake sleeping ranks.
bool Team::settle(Generation g, Phase from, Phase to) {
    Slot& here = slot(g);
    std::uint32_t state = here.state.load(std::memory_order_relaxed);
    do {
        if (phase_of(g, state) != from) return false;
    } while (!here.state.compare_exchange_weak(state, state_of(g, to), std::memory_order_seq_cst));
    // sleepers count themselves before the kernel compares the state: either we see them, or they see the new state
    if (here.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(here.state, to == Phase::open ? helpers_ : INT_MAX);
    return true;
}

// ---- finish ------------------------------------------------------------------------------------------------------------------

Status Team::finish(Generation g) {
    Slot& here = slot(g);
    Patience patience(ranks_per_core_);
    bool helped = false;
    std::int64_t begun = 0, looked = 0;
    Status status = Status::ok;
    for (;;) {
        const std::uint32_t state = here.state.load(std::memory_order_acquire);
        const Phase phase = phase_of(g, state);
        if (phase == Phase::done) break;
        if (phase == Phase::disagreed) {
            status = disagreement(g);
            break;
        }
        if (phase == Phase::failed) return adopt_failure();
        if (phase == Phase::open && !helped) {
            help(g);
            helped = true;
            patience = Patience(ranks_per_core_);
            continue;
        }
        if (patience.passes()) continue;

        const std::int64_t before = now_ns();
        if (begun == 0) begun = looked = before;
        here.sleepers.fetch_add(1, std::memory_order_seq_cst);
        futex_wait(here.state, state, look_every_ns);
        here.sleepers.fetch_sub(1, std::memory_order_relaxed);
        const std::int64_t now = now_ns();
        if (now - looked < look_every_ns && now - begun < timeout_ns_) continue;
        looked = now;
        status = look_around(g, now - begun);
        if (status != Status::ok) return status;
    }
    under_way_ = false;
    return status;
}

// Take chunks of this rank's own slice, which may still be in its cache, then of the others'.
void Team::help(Generation g) {
    Line& mine = row(g, rank_);
    const Call call = mine.call;
    const Cut whole = cut(call);
    const std::uint64_t tag = g << 32;
    std::uint32_t did = 0;
    mine.busy.store(1, std::memory_order_relaxed);
    for (int k = 0; k < size_; ++k) {
        const int owner = (rank_ + k) % size_;
        const std::uint64_t first = std::uint64_t{whole.chunks} * static_cast<unsigned>(owner) / static_cast<unsigned>(size_);
        const std::uint64_t last = std::uint64_t{whole.chunks} * static_cast<unsigned>(owner + 1) / static_cast<unsigned>(size_);
        std::atomic<std::uint64_t>& claim = row(g, owner).claim;
        std::uint64_t taken = claim.load(std::memory_order_relaxed);
        // the generation in the word keeps us out of the next operation if this one ends in the meantime
        while (taken >> 32 == tag >> 32 && first + (taken & 0xFFFFFFFF) < last) {
            if (!claim.compare_exchange_weak(taken, taken + 1, std::memory_order_relaxed)) continue;
            const std::size_t begin = (first + (taken & 0xFFFFFFFF)) * whole.per_chunk;
            work(call, begin, std::min(begin + whole.per_chunk, whole.elements));
            ++did;
            taken = claim.load(std::memory_order_relaxed);
        }
    }
    mine.busy.store(0, std::memory_order_relaxed);
    if (did == 0) return;
    const std::uint32_t done = slot(g).chunks_done.fetch_add(did, std::memory_order_acq_rel) + did;
    if (done == whole.chunks) settle(g, Phase::open, Phase::done);
}

// ---- the work ----------------------------------------------------------------------------------------------------------------

Team::Cut Team::cut(const Call& call) const {
    const bool meeting = call.verb == Verb::barrier || call.verb == Verb::allocate || call.verb == Verb::release;
    if (meeting || call.staged) return {0, 0, 0};  // each rank works on its own tensor before and after the meeting
    if (of_an_update(call.verb)) {  // `count` is the plan's number of chunks
        const std::uint32_t chunks = static_cast<std::uint32_t>(call.count);
        return {chunks, 1, chunks <= 1 ? 0 : chunks};
    }
    const std::size_t n = call.count, width = size_of(call.type), ranks = static_cast<std::size_t>(size_);
    if (n * width * ranks <= small_bytes) return {n, n, 0};
    // a few chunks per rank, so that a late rank costs little; whole cache lines
    const std::size_t bytes = std::clamp(up(n * width / (4 * ranks), line), chunk_bytes / 8, chunk_bytes);
    const std::size_t per_chunk = bytes / width;
    return {n, per_chunk, static_cast<std::uint32_t>((n + per_chunk - 1) / per_chunk)};
}

void Team::work(const Call& call, std::size_t first, std::size_t last) {
    if (of_an_update(call.verb))
        work_on_plan(call, first, last);
    else
        work_on_arena(call, first, last);
}

void Team::work_on_arena(const Call& call, std::size_t first, std::size_t last) {
    const Arena& shared = arena(call.arena);
    const std::size_t width = size_of(call.type), ranks = static_cast<std::size_t>(size_);
    const Reduce reduce = kernels().reduce[static_cast<int>(call.type)][static_cast<int>(call.op)];
    void* x[max_ranks];
    const auto point_at = [&](std::size_t element) {
        for (int r = 0; r < size_; ++r) x[r] = shared.part(r) + call.offset + element * width;
    };
    const auto copy_from = [&](std::size_t source, std::size_t elements) {
        for (std::size_t r = 0; r < ranks; ++r)
            if (r != source) std::memcpy(x[r], x[source], elements * width);
    };
    if (call.verb == Verb::all_reduce) {
        point_at(first);
        reduce(x, size_, x, size_, last - first, call.scale);
        return;
    }
    if (call.verb == Verb::broadcast) {
        point_at(first);
        copy_from(call.root, last - first);
        return;
    }
    for (std::size_t r = 0; r < ranks; ++r) {  // the parts that this range touches
        const std::size_t begin = std::max<std::size_t>(first, call.count * r / ranks);
        const std::size_t end = std::min<std::size_t>(last, call.count * (r + 1) / ranks);
        if (begin >= end) continue;
        point_at(begin);
        if (call.verb == Verb::reduce_scatter)
            reduce(x + r, 1, x, size_, end - begin, call.scale);
        else
            copy_from(r, end - begin);
    }
}

}  // namespace phalanx
