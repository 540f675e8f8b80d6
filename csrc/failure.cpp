// What a rank does when a wait times out: find the missing ranks, settle the operation as failed, and notify the others.
#include <climits>
#include <cstring>
#include <sched.h>

#include "team.hpp"

namespace phalanx {

Status Team::look_around(Generation g, std::int64_t waited_ns) {
    if (header_->broken.load(std::memory_order_acquire) != 0) return adopt_failure();
    if (aborted_.load()) return give_up(&g, Report{Status::aborted, {}, {}});
    if (interrupt_ && interrupt_()) return give_up(&g, Report{Status::interrupted, {}, {}});

    Report report{Status::dead, {}, {}};
    for (int r : watchman_.dead()) report.dead.add(r);
    for (int r = 0; r < size_; ++r)
        if (members_[r].left.load() != 0 && row(g, r).generation.load() != static_cast<std::uint32_t>(g)) report.dead.add(r);
    if (!report.dead.empty()) return give_up(&g, report);

    if (waited_ns < timeout_ns_) return Status::ok;
    report.status = Status::late;
    report.late = missing(g);
    return give_up(&g, report);
}

// The ranks that have not arrived or, if all have, those that have not finished their chunks.
RankSet Team::missing(Generation g) {
    RankSet absent{}, busy{};
    for (int r = 0; r < size_; ++r) {
        if (row(g, r).generation.load() != static_cast<std::uint32_t>(g)) absent.add(r);
        if (r != rank_ && row(g, r).busy.load() != 0) busy.add(r);
    }
    return absent.empty() ? busy : absent;
}

// `ok` means that the operation was settled in the meantime: look again.
Status Team::give_up(const Generation* g, const Report& report) {
    members_[rank_].report = report;
    if (g != nullptr) {
        // from now on no rank touches the data, except one in the middle of a chunk
        if (!settle(*g, Phase::gathering, Phase::failed) && !settle(*g, Phase::open, Phase::failed)) return Status::ok;
    }
    if (under_way_) settle(next_ - 1, Phase::gathering, Phase::failed) || settle(next_ - 1, Phase::open, Phase::failed);
    std::uint32_t whole = 0;
    if (!header_->broken.compare_exchange_strong(whole, static_cast<std::uint32_t>(rank_) + 1, std::memory_order_acq_rel))
        return adopt_failure();
    return record(report, rank_);
}

Status Team::adopt_failure() {
    // the author settles the operation first and signs a moment later; if it dies in between, we look for ourselves
    const std::int64_t begun = now_ns();
    std::uint32_t author = 0;
    while ((author = header_->broken.load(std::memory_order_acquire)) == 0 && now_ns() - begun < 100'000'000) sched_yield();
    if (author != 0) return record(members_[author - 1].report, static_cast<int>(author) - 1);
    Report report{Status::dead, {}, {}};
    for (int r : watchman_.dead()) report.dead.add(r);
    return record(report, rank_);
}

Status Team::record(const Report& report, int author) {
    broken_ = true;
    failure_ = Failure{};
    failure_.status = report.status;
    failure_.author = author;
    for (int r = 0; r < size_; ++r) {
        if (report.dead.has(r)) failure_.dead.push_back(r);
        if (report.late.has(r)) failure_.late.push_back(r);
    }
    return report.status;
}

Status Team::disagreement(Generation g) {
    failure_ = Failure{};
    failure_.status = Status::disagree;
    failure_.author = rank_;
    for (int r = 0; r < size_; ++r) failure_.calls.push_back(row(g, r).call);
    return Status::disagree;
}

Status Team::refuse(const std::string& why) {
    failure_ = Failure{};
    failure_.status = Status::refused;
    failure_.author = rank_;
    failure_.refusal = why;
    return Status::refused;
}

}  // namespace phalanx
