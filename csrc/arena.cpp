// Memory that all ranks of a team map: one part per rank, or one part shared by all.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <unistd.h>

#include "team.hpp"

namespace phalanx {
namespace {

template <std::size_t n>
void write_text(char (&to)[n], const std::string& text) {
    std::snprintf(to, n, "%s", text.c_str());
}

// Written without a sum that could overflow.
bool lies_in(const char* at, std::size_t bytes, const char* begin, std::size_t length) {
    return at >= begin && bytes <= length && static_cast<std::size_t>(at - begin) <= length - bytes;
}

}  // namespace

// Rank 0 creates it, the others map it, all report. Every step is an operation: it can time out, and names dead ranks.
Status Team::allocate(std::size_t bytes, bool one_for_all, Arena& arena) {
    Call call;
    call.verb = Verb::allocate;
    call.count = bytes;
    call.arena = next_arena_;
    call.root = one_for_all;
    const auto step = [&](std::uint32_t k) {
        call.piece = k;
        return size_ == 1 ? Status::ok : sync(call);
    };
    const std::size_t part = round_to_pages(std::max<std::size_t>(bytes, 1));
    const std::size_t total = one_for_all ? part : part * static_cast<std::size_t>(size_);
    Member& me = members_[rank_];

    Status status = step(0);  // all ranks asked for the same
    if (status != Status::ok) return status;
    std::shared_ptr<Segment> segment;
    if (rank_ == 0) {
        write_text(header_->refusal, "");
        try {
            segment = Segment::create(total, method_);
            write_text(header_->place, segment->place().text());
        } catch (const SegmentError& error) {
            write_text(header_->refusal, error.what());
        }
    }
    if ((status = step(1)) != Status::ok) return status;
    if (header_->refusal[0] != 0) return refuse("rank 0: " + std::string(header_->refusal));
    write_text(me.refusal, "");
    const Place place = Place::parse(std::string(header_->place, strnlen(header_->place, place_bytes)));
    if (rank_ != 0) {
        try {
            segment = Segment::open(place, total);
        } catch (const SegmentError& error) {
            write_text(me.refusal, error.what());
        }
    }
    status = step(2);
    if (status != Status::ok) {
        if (method_ == Method::named) unlink(place.path().c_str());  // rank 0 may have died
        return status;
    }
    if (rank_ == 0) segment->forget_place();
    for (int r = 0; r < size_; ++r)
        if (members_[r].refusal[0] != 0) return refuse("rank " + std::to_string(r) + ": " + members_[r].refusal);

    arena.id = next_arena_++;
    arena.segment = segment;
    arena.bytes = bytes;
    arena.stride = one_for_all ? 0 : part;
    // each rank touches its own part first, so that on a NUMA machine it lies near that rank
    if (!one_for_all || rank_ == 0) segment->populate(arena.stride * static_cast<std::size_t>(rank_), part);
    if ((status = step(3)) != Status::ok) return status;
    segment->populate(0, total);
    if ((status = step(4)) != Status::ok) return status;
    arenas_.push_back(arena);
    return Status::ok;
}

Status Team::release(std::uint32_t id) {
    Call call;
    call.verb = Verb::release;
    call.arena = id;
    const Status status = size_ == 1 ? Status::ok : sync(call);  // no rank uses it any more
    if (status == Status::ok)
        arenas_.erase(std::remove_if(arenas_.begin(), arenas_.end(), [id](const Arena& a) { return a.id == id; }), arenas_.end());
    return status;
}

bool Team::owns(const void* x, std::size_t bytes) const {
    Call call;
    return locate(x, bytes, call);
}

bool Team::locate(const void* x, std::size_t bytes, Call& call) const {
    for (const Arena& arena : arenas_) {
        if (arena.stride == 0 && size_ > 1) continue;  // shared by all: nothing to reduce
        const char* part = arena.part(rank_);
        const char* at = static_cast<const char*>(x);
        if (!lies_in(at, bytes, part, arena.bytes)) continue;
        call.arena = arena.id;
        call.offset = static_cast<std::uint64_t>(at - part);
        return true;
    }
    return false;
}

// `place` (arena and offset) identifies the memory on all ranks.
bool Team::locate_one_for_all(const void* x, std::size_t bytes, std::uint64_t& place) const {
    for (const Arena& arena : arenas_) {
        const char* begin = arena.segment->data();
        const char* at = static_cast<const char*>(x);
        if ((arena.stride != 0 && size_ > 1) || !lies_in(at, bytes, begin, arena.bytes)) continue;
        place = std::uint64_t{arena.id} << 48 ^ static_cast<std::uint64_t>(at - begin);
        return true;
    }
    return false;
}

const Arena& Team::arena(std::uint32_t id) const {
    for (const Arena& arena : arenas_)
        if (arena.id == id) return arena;
    throw std::logic_error("no such arena");  // ids were compared when the ranks met
}

}  // namespace phalanx
