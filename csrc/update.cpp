// The fused update by the rule of torch.optim.SGD or LARS.
//
// LARS needs |g| first, so it takes two passes: the first sums the gradients only for their squares, the second sums them for the
// update and also sums the squares of w (lars.hpp). Squares are stored per chunk where all ranks see them, so all ranks add the
// same numbers in the same order.
#include <vector>

#include "lars.hpp"
#include "plan.hpp"

namespace phalanx {

std::uint64_t digest_of(const void* data, std::size_t bytes, std::uint64_t seed) {
    const unsigned char* at = static_cast<const unsigned char*>(data);
    std::uint64_t hash = seed ^ 0xCBF29CE484222325;
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001B3;  // FNV-1a
    return hash;
}

Status Team::pass(Plan& plan, Call& call, Verb verb) {
    call.verb = verb;
    plan_ = &plan;
    Status status = Status::ok;
    if (size_ > 1)
        status = sync(call);
    else
        work_on_plan(call, 0, plan.chunks.size());
    plan_ = nullptr;
    return status;
}

void Team::work_on_plan(const Call& call, std::size_t first, std::size_t last) {
    const float* sources[max_ranks];
    for (std::size_t c = first; c < last; ++c) {
        for (int r = 0; r < size_; ++r)
            sources[r] = reinterpret_cast<const float*>(plan_->gradients->part(r) + plan_->offset) + plan_->chunks[c].first;
        plan_->work(call.verb, c, sources, size_);
    }
}

namespace {

struct Tensor {
    Rule rule, wanted;  // they differ if the rule used an outdated norm
    bool adapted, carried = false, repaired = false;
    double w = 0, found = 0, g = 0;  // sums of squares
};

}  // namespace

struct Team::SgdPlan : Team::Plan {
    float *parameters, *velocities;
    std::vector<Tensor> tensors;
    ChunkSquares* squares;  // per chunk

    void work(Verb verb, std::size_t c, const float* const* sources, int ranks) const override {
        const Chunk& chunk = chunks[c];
        const Tensor& tensor = tensors[chunk.tensor];
        float *w = parameters + chunk.first, *v = velocities + chunk.first;
        if (!tensor.adapted) {
            if (verb == Verb::update) kernels().update(w, v, sources, ranks, chunk.count, tensor.rule);
            return;
        }
        ChunkSquares& mine = squares[c];
        if (verb == Verb::norms) {
            const Squares found = kernels().norms(tensor.carried ? nullptr : w, sources, ranks, chunk.count, scale);
            mine.g = found.g;
            if (!tensor.carried) mine.w = found.w;
        } else if (verb == Verb::update) {
            const Moved moved = kernels().update_and_square(w, v, sources, ranks, chunk.count, tensor.rule);
            mine.found = moved.before;
            mine.w = moved.after;
        } else if (tensor.repaired) {
            repair(w, v, sources, ranks, chunk.count, tensor.rule, tensor.wanted);
            mine.w = kernels().norms(w, sources, ranks, chunk.count, scale).w;
        }
    }

    void add_up() {
        for (Tensor& tensor : tensors) tensor.w = tensor.found = tensor.g = 0;
        for (std::size_t c = 0; c < chunks.size(); ++c) {
            Tensor& tensor = tensors[chunks[c].tensor];
            if (!tensor.adapted) continue;
            tensor.w += squares[c].w;
            tensor.found += squares[c].found;
            tensor.g += squares[c].g;
        }
    }
};

Status Team::update(const FusedUpdate& what) {
    SgdPlan plan;
    plan.cut(what.rows, what.tensors);
    Call call;
    std::uint64_t w = 0, v = 0, s = 0;
    const std::size_t bytes = plan.end * sizeof(float);
    if (!locate(what.gradients, bytes, call)) return refuse("the gradients of a fused update lie in an arena");
    bool adapts = false;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        const Rule plain = rule_of(what.rows[t], 1, what.scale);
        plan.tensors.push_back({plain, plain, what.rows[t].adapted != 0});
        adapts = adapts || plan.tensors[t].adapted;
    }
    plan.make_chunks(what.rows, what.tensors);
    if (!locate_one_for_all(what.parameters, bytes, w) || !locate_one_for_all(what.velocities, bytes, v) ||
        (adapts && !locate_one_for_all(what.squares, plan.chunks.size() * sizeof(ChunkSquares), s)))
        return refuse("the parameters, velocities and squares of a fused update lie in memory that is one for all ranks");
    call.type = Type::f32;
    call.count = plan.chunks.size();
    call.scale = what.scale;
    call.root = what.carry;
    call.digest = digest_of(what.rows, what.tensors * sizeof(TensorRow), (w * 31 + v) * 31 + s);
    plan.gradients = &arena(call.arena);
    plan.offset = call.offset;
    plan.parameters = what.parameters;
    plan.velocities = what.velocities;
    plan.scale = what.scale;
    plan.squares = what.squares;
    return adapts ? adapt(plan, call, what) : pass(plan, call, Verb::update);
}

// No rank writes squares between two passes, so all ranks read the same ones and decide the same.
Status Team::adapt(SgdPlan& plan, Call& call, const FusedUpdate& what) {
    plan.add_up();
    for (Tensor& tensor : plan.tensors) tensor.carried = what.carry && tensor.adapted && can_be_carried(tensor.w);
    Status status = pass(plan, call, Verb::norms);
    if (status != Status::ok) return status;

    plan.add_up();
    std::vector<double> used;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        Tensor& tensor = plan.tensors[t];
        tensor.rule = rule_of(what.rows[t], ratio_of(what.rows[t], tensor.w, tensor.g), what.scale);
        used.push_back(tensor.w);
    }
    status = pass(plan, call, Verb::update);
    if (status != Status::ok) return status;

    plan.add_up();
    bool any = false;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        Tensor& tensor = plan.tensors[t];
        tensor.repaired = tensor.carried && tensor.found != used[t];
        if (tensor.repaired) tensor.wanted = rule_of(what.rows[t], ratio_of(what.rows[t], tensor.found, tensor.g), what.scale);
        any = any || tensor.repaired;
    }
    return any ? pass(plan, call, Verb::repair) : Status::ok;
}

}  // namespace phalanx
