// Tensors outside the arenas pass through the staging area piece by piece.
//
// A step is a meeting of all ranks and what each rank does until the next meeting. Steps are counted over all calls, the same on
// all ranks, and each rank's part of the stage has three thirds that take turns. After the meeting of step s a rank
//     writes its own third s + 1, and in its own third s the slice that it reduces;
//     reads the thirds s of others, except the slice that its owner reduces, and only that slice of their thirds s - 1.
// All ranks are done with this when the next meeting ends. So no data is read while another rank writes it, and one meeting per
// step is enough.
//
// A reduce-scatter is one exchange: each rank writes the pieces of the other ranks' parts, and sums those of its own. There are two
// ways to all-reduce. *Each for itself*: all ranks write their piece, and each sums what all have written. *In slices*: each rank
// reduces one slice of every piece, and all copy the result a step later, after another meeting.
#include <algorithm>
#include <cstring>

#include "team.hpp"

namespace phalanx {

// A range of the flat tensor, in elements.
struct Team::Range {
    std::size_t first, last;
    Range within(const Range& other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
    std::size_t count() const { return first < last ? last - first : 0; }
};

Team::Range Team::part_of(const Call& call, int rank) const {
    const std::size_t r = static_cast<std::size_t>(rank), ranks = static_cast<std::size_t>(size_);
    return {call.count * r / ranks, call.count * (r + 1) / ranks};
}

// Elements of one piece.
std::size_t Team::per_piece(const Call& call) const {
    const std::size_t width = size_of(call.type);
    return (long_pieces_ || call.count * width <= whole_ ? whole_ : third_) / width;
}

// Piece k of a range; it starts at the beginning of its third.
Team::Range Team::piece_of(const Call& call, const Range& whole, std::uint32_t k) const {
    const std::size_t first = whole.first + k * per_piece(call);
    return {first, std::min(first + per_piece(call), whole.last)};
}

std::uint32_t Team::pieces_of(const Call& call, std::size_t elements) const {
    const std::size_t per = per_piece(call);
    return static_cast<std::uint32_t>(std::max<std::size_t>(1, (elements + per - 1) / per));
}

Status Team::on_stage(const Call& call, char* x) {
    if (call.verb == Verb::all_gather || call.verb == Verb::broadcast) return copy_on_stage(call, x);
    if (call.verb == Verb::reduce_scatter) return reduce_parts(call, x);
    const bool small = call.count * size_of(call.type) * static_cast<std::size_t>(size_) <= few_bytes;
    return small || size_ <= few_ranks ? reduce_each_for_itself(call, x) : reduce_in_slices(call, x);
}

// Run the meetings of one call, and `after(k)` each of them. Steps count only if the call succeeds. Ranks that disagree on the
// count notice at the first meeting, so all of them have made the same number of steps.
template <class After>
Status Team::take_steps(Call call, std::uint32_t steps, After after) {
    for (std::uint32_t k = 0; k < steps; ++k) {
        call.piece = k;
        call.staged = static_cast<std::uint8_t>(1 + (stage_steps_ + k) % thirds + (long_pieces_ ? thirds : 0));
        const Status status = sync(call);
        if (status != Status::ok) return status;
        after(k);
    }
    stage_steps_ = (stage_steps_ + steps) % thirds;
    return Status::ok;
}

Status Team::copy_on_stage(const Call& call, char* x) {
    const std::size_t width = size_of(call.type), ranks = static_cast<std::size_t>(size_);
    const auto gives = [&](int rank) {
        if (call.verb == Verb::all_gather) return part_of(call, rank);
        return call.root == static_cast<std::uint32_t>(rank) ? Range{0, call.count} : Range{0, 0};
    };
    const auto put_in = [&](std::uint32_t k) {
        const Range mine = piece_of(call, gives(rank_), k);
        if (mine.count() != 0) kernels().put(stage(rank_, k), x + mine.first * width, mine.count() * width);
    };
    const std::uint32_t pieces = pieces_of(call, call.verb == Verb::broadcast ? call.count : (call.count + ranks - 1) / ranks);
    if (!ahead_) put_in(0);
    return take_steps(call, pieces, [&](std::uint32_t k) {
        put_in(k + 1);
        for (int source = 0; source < size_; ++source) {
            const Range given = piece_of(call, gives(source), k);
            if (source == rank_ || given.count() == 0) continue;
            std::memcpy(x + given.first * width, stage(source, k), given.count() * width);
        }
    });
}

// A third has room for one piece of every rank's part.
Status Team::reduce_parts(const Call& call, char* x) {
    const std::size_t width = size_of(call.type), ranks = static_cast<std::size_t>(size_);
    const std::size_t room = per_piece(call) * width / ranks / line * line, per = room / width;
    const Reduce reduce = kernels().reduce[static_cast<int>(call.type)][static_cast<int>(call.op)];
    const auto piece_of_part = [&](int owner, std::uint32_t k) {
        const Range part = part_of(call, owner);
        return Range{part.first + k * per, part.first + (k + 1) * per}.within(part);
    };
    const auto place = [&](int writer, int owner, std::uint32_t k) {
        return stage(writer, k) + room * static_cast<std::size_t>(owner);
    };
    const auto put_in = [&](std::uint32_t k) {
        for (int owner = 0; owner < size_; ++owner) {
            const Range piece = piece_of_part(owner, k);
            if (owner == rank_ || piece.count() == 0) continue;
            kernels().put(place(rank_, owner, k), x + piece.first * width, piece.count() * width);
        }
    };
    const std::size_t longest = (call.count + ranks - 1) / ranks;
    const std::uint32_t pieces = static_cast<std::uint32_t>(std::max<std::size_t>(1, (longest + per - 1) / per));
    if (!ahead_) put_in(0);
    return take_steps(call, pieces, [&](std::uint32_t k) {
        put_in(k + 1);
        const Range mine = piece_of_part(rank_, k);
        if (mine.count() == 0) return;
        void* to = x + mine.first * width;
        const void* from[max_ranks];
        for (int r = 0; r < size_; ++r) from[r] = place(r, rank_, k);
        from[rank_] = to;
        reduce(&to, 1, from, size_, mine.count(), call.scale);
    });
}

Status Team::reduce_each_for_itself(const Call& call, char* x) {
    const std::size_t width = size_of(call.type);
    const Range all{0, call.count};
    const Reduce reduce = kernels().reduce[static_cast<int>(call.type)][static_cast<int>(call.op)];
    const auto put_in = [&](std::uint32_t k) {
        const Range piece = piece_of(call, all, k);
        if (piece.count() != 0) kernels().put(stage(rank_, k), x + piece.first * width, piece.count() * width);
    };
    if (!ahead_) put_in(0);
    return take_steps(call, pieces_of(call, call.count), [&](std::uint32_t k) {
        put_in(k + 1);
        const Range piece = piece_of(call, all, k);
        if (piece.count() == 0) return;
        void* to = x + piece.first * width;
        const void* from[max_ranks];
        for (int r = 0; r < size_; ++r) from[r] = stage(r, k);
        from[rank_] = to;  // it is in this core's cache; so no rank reads its own piece from the stage
        reduce(&to, 1, from, size_, piece.count(), call.scale);
    });
}

// After meeting k a rank reduces its slice of piece k, writes piece k + 1 and copies piece k - 1 out. It reads its own slice from
// the tensor, and leaves the result in that slice on the stage.
Status Team::reduce_in_slices(const Call& call, char* x) {
    const std::size_t width = size_of(call.type), ranks = static_cast<std::size_t>(size_);
    const std::uint32_t pieces = pieces_of(call, call.count);
    const Range all{0, call.count};
    const Reduce reduce = kernels().reduce[static_cast<int>(call.type)][static_cast<int>(call.op)];
    const auto slice_of = [&](std::uint32_t k, int rank) {  // whole cache lines of the stage
        const Range piece = piece_of(call, all, k);
        const std::size_t share = ((piece.count() + ranks - 1) / ranks * width + line - 1) / line * line / width;
        const std::size_t first = piece.first + share * static_cast<std::size_t>(rank);
        return Range{std::min(first, piece.last), std::min(first + share, piece.last)};
    };
    const auto on_third = [&](int owner, std::uint32_t k, std::size_t element) {
        return stage(owner, k) + (element - piece_of(call, all, k).first) * width;
    };
    const auto put_in = [&](std::uint32_t k, int peer) {
        const Range slice = slice_of(k, peer);
        if (slice.count() != 0) kernels().put(on_third(rank_, k, slice.first), x + slice.first * width, slice.count() * width);
    };
    const auto take_out = [&](std::uint32_t k, int peer) {
        const Range slice = slice_of(k, peer);
        if (slice.count() != 0) std::memcpy(x + slice.first * width, on_third(peer, k, slice.first), slice.count() * width);
    };
    const auto reduce_mine = [&](std::uint32_t k) {
        const Range slice = slice_of(k, rank_);
        if (slice.count() == 0) return;
        void* to[2] = {on_third(rank_, k, slice.first), x + slice.first * width};
        const void* from[max_ranks];
        for (int r = 0; r < size_; ++r) from[r] = on_third(r, k, slice.first);
        from[rank_] = to[1];
        reduce(to, 2, from, size_, slice.count(), call.scale);
    };
    // write k + 1 and copy k - 1 out together; they have the same cuts, unless k + 1 is the last and shorter. Slices are whole cache
    // lines, so the last rank's slice of the shorter piece may be the longer one
    const auto exchange = [&](std::uint32_t k, int peer) {
        const Range in = slice_of(k + 1, peer), out = slice_of(k - 1, peer);
        const std::size_t bytes = std::min(in.count(), out.count()) * width;
        kernels().exchange(on_third(rank_, k + 1, in.first), x + in.first * width, x + out.first * width,
                           on_third(peer, k - 1, out.first), bytes);
        const std::size_t rest = out.count() * width - bytes, more = in.count() * width - bytes;
        if (rest != 0) std::memcpy(x + out.first * width + bytes, on_third(peer, k - 1, out.first) + bytes, rest);
        if (more != 0) kernels().put(on_third(rank_, k + 1, in.first) + bytes, x + in.first * width + bytes, more);
    };

    for (int peer = 0; peer < size_ && !ahead_; ++peer)
        if (peer != rank_) put_in(0, peer);
    return take_steps(call, pieces + 1, [&](std::uint32_t k) {
        if (k < pieces) reduce_mine(k);
        for (int i = 1; i < size_; ++i) {
            const int peer = (rank_ + i) % size_;  // so that not all ranks read from the same one
            if (k > 0 && k + 1 < pieces) {
                exchange(k, peer);
            } else if (k > 0) {
                take_out(k - 1, peer);
            } else if (k + 1 < pieces) {
                put_in(k + 1, peer);
            }
        }
    });
}

}  // namespace phalanx
