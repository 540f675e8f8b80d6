// Tensors that live outside of the arenas pass through the staging area piece by piece, in two halves that take turns.
//
// Two ways. *Each for itself*: all put in, and each rank takes out what it wants, summing on the way; one meeting per piece, but
// every rank reads what all have put in. *Together*: it is reduced once, by whoever has time, and all copy the result.
#include <algorithm>
#include <cstring>

#include "team.hpp"

namespace phalanx {
namespace {

// Ranks whose reductions go each for itself: for 2, 64 KiB take 11 us instead of 14; for 3 it is slower than together.
constexpr int few_ranks = 2;

}  // namespace

bool Team::each_for_itself(const Call& call) const {
    return call.verb == Verb::all_gather || call.verb == Verb::broadcast || size_ <= few_ranks;
}

// Begin piece k. Steps of the stage are counted over all calls, and only when they succeed, so that all ranks count alike; the
// parity of the step is the half.
Status Team::begin_piece(Call& call, std::uint32_t k, Generation& g) {
    call.piece = k;
    call.staged = static_cast<std::uint8_t>(1 + (stage_steps_ + k) % 2);
    return begin(call, g);
}

// A range of the flat tensor, in elements.
struct Team::Range {
    std::size_t first, last;
    Range within(const Range& other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
    std::size_t count() const { return first < last ? last - first : 0; }
};

Status Team::on_stage(Call call, char* x) {
    const std::size_t width = size_of(call.type), per_piece = half_ / width, ranks = static_cast<std::size_t>(size_);
    const auto part = [&](int rank) {
        const std::size_t r = static_cast<std::size_t>(rank);
        return Range{call.count * r / ranks, call.count * (r + 1) / ranks};
    };
    const Range all{0, call.count}, none{0, 0};
    // piece k of a range lies at the beginning of the half
    const auto piece = [&](const Range& whole, std::uint32_t k) {
        const std::size_t first = whole.first + k * per_piece;
        return Range{first, std::min(first + per_piece, whole.last)};
    };
    const auto gives = [&](int rank) {
        if (call.verb == Verb::all_gather) return part(rank);
        return call.verb == Verb::broadcast && call.root != static_cast<std::uint32_t>(rank) ? none : all;
    };
    const auto put_in = [&](std::uint32_t k) {
        const Range mine = piece(gives(rank_), k);
        if (mine.count() != 0) std::memcpy(stage(rank_, stage_steps_ + k), x + mine.first * width, mine.count() * width);
    };
    const auto copy_out = [&](int source, const Range& given, const Range& wanted, std::uint32_t k) {
        const Range here = piece(given, k), range = here.within(wanted);
        if (range.count() == 0) return;
        const char* from = stage(source, stage_steps_ + k) + (range.first - here.first) * width;
        std::memcpy(x + range.first * width, from, range.count() * width);
    };

    if (call.verb == Verb::all_gather || call.verb == Verb::broadcast) {
        const std::size_t longest = call.verb == Verb::broadcast ? call.count : (call.count + ranks - 1) / ranks;
        return take_turns(call, longest, put_in, [&](std::uint32_t k) {
            for (int source = 0; source < size_; ++source)
                if (source != rank_) copy_out(source, gives(source), all, k);
        });
    }
    const Range wanted = call.verb == Verb::all_reduce ? all : part(rank_);
    if (!each_for_itself(call))
        return take_turns_together(call, call.count, put_in, [&](std::uint32_t k) { copy_out(size_, all, wanted, k); });
    return take_turns(call, call.count, put_in, [&](std::uint32_t k) {
        const Range here = piece(all, k), range = here.within(wanted);
        if (range.count() == 0) return;
        void* to = x + range.first * width;
        reduce_stages(call, stage_steps_ + k, range.first - here.first, range.count(), to);
    });
}

// finish(k) | in(k+1) | out(k) | begin(k+1): all have begun k, so all have taken k-1 out, so its half is free for k+1.
// Piece 0 is finished before piece 1 begins, so that ranks which disagree on the count have made the same number of steps.
template <class In, class Out>
Status Team::take_turns(Call call, std::size_t longest, In in, Out out) {
    const std::uint32_t pieces = pieces_of(call, longest);
    Generation g;
    in(0);
    Status status = begin_piece(call, 0, g);
    for (std::uint32_t k = 0; k < pieces && status == Status::ok; ++k) {
        status = finish(g);
        if (status != Status::ok) return status;
        if (k + 1 < pieces) in(k + 1);
        out(k);
        if (k + 1 < pieces) status = begin_piece(call, k + 1, g);
    }
    if (status == Status::ok) stage_steps_ += pieces;
    return status;
}

// in(k+1) | finish(k) | begin(k+1) | out(k): while I copy out, the others already reduce the next piece.
// in(k+1) overwrites what the reduction of k-1 read, and I have finished that. The result of k+1 overwrites that of k-1, and is not
// begun before all have copied k-1 out, because each does so before it begins k+1. But in(1) may overwrite what others still take
// from an earlier broadcast, until all have begun 0.
template <class In, class Out>
Status Team::take_turns_together(Call call, std::size_t longest, In in, Out out) {
    const std::uint32_t pieces = pieces_of(call, longest);
    Generation g;
    in(0);
    Status status = begin_piece(call, 0, g);
    for (std::uint32_t k = 0; k < pieces && status == Status::ok; ++k) {
        if (k > 0 && k + 1 < pieces) in(k + 1);
        status = finish(g);
        if (status != Status::ok) return status;
        if (k == 0 && pieces > 1) in(1);
        if (k + 1 < pieces) status = begin_piece(call, k + 1, g);
        out(k);
    }
    if (status == Status::ok) stage_steps_ += pieces;
    return status;
}

std::uint32_t Team::pieces_of(const Call& call, std::size_t elements) const {
    const std::size_t per_piece = half_ / size_of(call.type);
    return static_cast<std::uint32_t>(std::max<std::size_t>(1, (elements + per_piece - 1) / per_piece));
}

void Team::reduce_stages(const Call& call, std::uint32_t step, std::size_t first, std::size_t count, void* to) {
    const void* from[max_ranks];
    for (int r = 0; r < size_; ++r) from[r] = stage(r, step) + first * size_of(call.type);
    kernels().reduce[static_cast<int>(call.type)][static_cast<int>(call.op)](&to, 1, from, size_, count, call.scale);
}

void Team::work_on_stage(const Call& call, std::size_t first, std::size_t last) {
    const std::uint32_t half = call.staged - 1u;
    reduce_stages(call, half, first, last - first, stage(size_, half) + first * size_of(call.type));
}

}  // namespace phalanx
