// An operation in two calls: one thread begins it, another finishes it.
//
// Handing an operation over to a thread takes 50 to 300 us, and the two threads then compete for one core. So the calling thread
// begins the operation itself, and also finishes it if all ranks arrive within a moment. If they do not, it returns, and another
// thread repeats the call. The repeated call finds the first meeting begun, with this rank counted in and the first piece on the
// stage.
#include <cstring>
#include <sched.h>
#include <stdexcept>

#include "team.hpp"

namespace phalanx {

Status Team::all_reduce_or_begin(void* x, std::size_t count, Type type, Op op, double scale, std::int64_t patience_ns) {
    patience_ns_ = patience_ns;
    const Status status = all_reduce(x, count, type, op, scale);
    patience_ns_ = -1;  // a failed call has not used it
    return status;
}

Status Team::sync(const Call& call) {
    Generation g = next_ - 1;
    if (ahead_) {
        Call same = call;
        same.digest ^= topic_;
        if (std::memcmp(&row(g, rank_).call, &same, sizeof same) != 0)
            throw std::logic_error("the last all_reduce is only begun: this call must be the same again");
        ahead_ = false;
    } else if (const Status begun = begin(call, g); begun != Status::ok) {
        return begun;
    }
    if (patience_ns_ >= 0) {
        ahead_ = !all_come_within(g, patience_ns_);
        patience_ns_ = -1;
        if (ahead_) return Status::begun;
    }
    return finish(g);
}

bool Team::all_come_within(Generation g, std::int64_t nanoseconds) {
    const Word& state = slot(g).state;
    const auto waits = [&] { return phase_of(g, state.load(std::memory_order_acquire)) == Phase::gathering; };
    if (!waits()) return true;
    const std::int64_t until = now_ns() + nanoseconds;
    while (waits()) {
        if (now_ns() >= until) return false;
        if (ranks_per_core_ > 1) sched_yield();  // the missing rank may share this core
    }
    return true;
}

}  // namespace phalanx
