// The fused update: who sums a chunk of the gradients also moves the parameters by it.
//
// LARS needs |g| first, so it takes two passes: the first sums the gradients for their squares alone, the second for the update,
// and sums the squares of w on the way (lars.hpp). Squares are left per chunk, where all ranks see them: all add up the same
// numbers in the same order.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "lars.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

std::uint64_t digest_of(const void* data, std::size_t bytes, std::uint64_t seed) {
    const unsigned char* at = static_cast<const unsigned char*>(data);
    std::uint64_t hash = seed ^ 0xCBF29CE484222325;
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001B3;  // FNV-1a
    return hash;
}

}  // namespace

struct Team::Plan {
    struct Chunk {
        std::uint32_t tensor;
        std::size_t first, count;  // elements of the flat buffers
    };
    struct Tensor {
        Rule rule, wanted;  // they differ where the rule was made of a norm that was not true
        bool adapted, carried, repaired;
        double w, found, g;  // sums of squares
    };
    const Arena* gradients;
    std::uint64_t offset;  // bytes, of the flat gradients in each part
    float *parameters, *velocities;
    double scale;
    std::vector<Tensor> tensors;
    std::vector<Chunk> chunks;
    ChunkSquares* squares;  // per chunk

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
    std::size_t end = 0;
    bool adapts = false;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        if (!is_plausible(what.rows[t])) throw std::invalid_argument("offset and count of a tensor are whole numbers from 0 on");
        end = std::max(end, static_cast<std::size_t>(what.rows[t].offset) + static_cast<std::size_t>(what.rows[t].count));
        adapts = adapts || what.rows[t].adapted != 0;
    }
    Call call;
    std::uint64_t w = 0, v = 0, s = 0;
    const std::size_t bytes = end * sizeof(float);
    if (!locate(what.gradients, bytes, call)) return refuse("the gradients of a fused update lie in an arena");
    Plan plan;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        const TensorRow& row = what.rows[t];
        const std::size_t offset = static_cast<std::size_t>(row.offset), count = static_cast<std::size_t>(row.count);
        const Rule plain = rule_of(row, 1, what.scale);
        plan.tensors.push_back({plain, plain, row.adapted != 0, false, false, 0, 0, 0});
        for (std::size_t at = 0; at < count; at += chunk_elements)
            plan.chunks.push_back({static_cast<std::uint32_t>(t), offset + at, std::min(chunk_elements, count - at)});
    }
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

    const auto pass = [&](Verb verb) {
        call.verb = verb;
        if (size_ > 1) return sync(call);
        work_on_plan(call, 0, plan.chunks.size());
        return Status::ok;
    };
    plan_ = &plan;
    const Status status = adapts ? adapt(plan, what, pass) : pass(Verb::update);
    plan_ = nullptr;
    return status;
}

// Nobody writes squares between two passes, so all ranks find the same ones and decide alike.
template <class Pass>
Status Team::adapt(Plan& plan, const FusedUpdate& what, Pass pass) {
    plan.add_up();
    for (Plan::Tensor& tensor : plan.tensors) tensor.carried = what.carry && tensor.adapted && can_be_carried(tensor.w);
    Status status = pass(Verb::norms);
    if (status != Status::ok) return status;

    plan.add_up();
    std::vector<double> used;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        Plan::Tensor& tensor = plan.tensors[t];
        tensor.rule = rule_of(what.rows[t], ratio_of(what.rows[t], tensor.w, tensor.g), what.scale);
        used.push_back(tensor.w);
    }
    status = pass(Verb::update);
    if (status != Status::ok) return status;

    plan.add_up();
    bool any = false;
    for (std::size_t t = 0; t < what.tensors; ++t) {
        Plan::Tensor& tensor = plan.tensors[t];
        tensor.repaired = tensor.carried && tensor.found != used[t];
        if (tensor.repaired) tensor.wanted = rule_of(what.rows[t], ratio_of(what.rows[t], tensor.found, tensor.g), what.scale);
        any = any || tensor.repaired;
    }
    return any ? pass(Verb::repair) : Status::ok;
}

void Team::work_on_plan(const Call& call, std::size_t first, std::size_t last) {
    const Plan& plan = *plan_;
    const float* gradients[max_ranks];
    for (std::size_t c = first; c < last; ++c) {
        const Plan::Chunk& chunk = plan.chunks[c];
        const Plan::Tensor& tensor = plan.tensors[chunk.tensor];
        for (int r = 0; r < size_; ++r)
            gradients[r] = reinterpret_cast<const float*>(plan.gradients->part(r) + plan.offset) + chunk.first;
        float *w = plan.parameters + chunk.first, *v = plan.velocities + chunk.first;
        if (!tensor.adapted) {
            if (call.verb == Verb::update) kernels().update(w, v, gradients, size_, chunk.count, tensor.rule);
            continue;
        }
        ChunkSquares& squares = plan.squares[c];
        if (call.verb == Verb::norms) {
            const Squares found = kernels().norms(tensor.carried ? nullptr : w, gradients, size_, chunk.count, plan.scale);
            squares.g = found.g;
            if (!tensor.carried) squares.w = found.w;
        } else if (call.verb == Verb::update) {
            const Moved moved = kernels().update_and_square(w, v, gradients, size_, chunk.count, tensor.rule);
            squares.found = moved.before;
            squares.w = moved.after;
        } else if (tensor.repaired) {
            repair(w, v, gradients, size_, chunk.count, tensor.rule, tensor.wanted);
            squares.w = kernels().norms(w, gradients, size_, chunk.count, plan.scale).w;
        }
    }
}

}  // namespace phalanx
