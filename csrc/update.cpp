// The fused update: who sums a chunk of the gradients also moves the parameters by it. LARS needs norms first: two passes, where
// the first leaves sums of squares per chunk in the control segment, so that all ranks add up the same numbers in the same order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "team.hpp"

namespace phalanx {
namespace {

constexpr std::size_t chunk_elements = 16 << 10;  // 64 KiB of each: gradients of all ranks, parameters and velocities fit an L2

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
    const Arena* gradients;
    std::uint64_t offset;  // bytes, of the flat gradients in each part
    float *parameters, *velocities;
    double scale;
    std::vector<Rule> rules;
    std::vector<Chunk> chunks;
    Squares* squares;  // per chunk, where all ranks see them
};

Status Team::update(
    const float* gradients, float* parameters, float* velocities, const TensorRow* rows, std::size_t tensors, double scale) {
    Plan plan;
    std::size_t end = 0;
    for (std::size_t t = 0; t < tensors; ++t) end = std::max(end, static_cast<std::size_t>(rows[t].offset + rows[t].count));
    // a chunk has a place for its squares
    const std::size_t places = norms_bytes / sizeof(Squares);
    const std::size_t per_chunk = tensors < places ? std::max(chunk_elements, end / (places - tensors) + 1) : 0;
    if (per_chunk == 0) return refuse("more tensors than the control segment has places for their norms");
    bool lars = false;
    for (std::size_t t = 0; t < tensors; ++t) {
        const TensorRow& row = rows[t];
        plan.rules.push_back({static_cast<float>(row.lr), static_cast<float>(row.momentum), static_cast<float>(row.weight_decay),
                              static_cast<float>(scale), 1.0f, row.nesterov != 0, row.lars != 0});
        lars = lars || (row.lars != 0 && row.trust != 0);
        const std::size_t offset = static_cast<std::size_t>(row.offset), count = static_cast<std::size_t>(row.count);
        for (std::size_t at = 0; at < count; at += per_chunk)
            plan.chunks.push_back({static_cast<std::uint32_t>(t), offset + at, std::min(per_chunk, count - at)});
    }
    Call call;
    std::uint64_t w = 0, v = 0;
    const std::size_t bytes = end * sizeof(float);
    if (!locate(gradients, bytes, call)) return refuse("the gradients of a fused update lie in an arena");
    if (!locate_one_for_all(parameters, bytes, w) || !locate_one_for_all(velocities, bytes, v))
        return refuse("the parameters and velocities of a fused update lie in memory that is one for all ranks");
    call.type = Type::f32;
    call.count = plan.chunks.size();
    call.scale = scale;
    call.digest = digest_of(rows, tensors * sizeof(TensorRow), w * 31 + v);
    plan.gradients = &arena(call.arena);
    plan.offset = call.offset;
    plan.parameters = parameters;
    plan.velocities = velocities;
    plan.scale = scale;
    plan.squares = reinterpret_cast<Squares*>(norms_);

    const auto pass = [&](Verb verb) {
        call.verb = verb;
        if (size_ > 1) return sync(call);
        work_on_plan(call, 0, plan.chunks.size());
        return Status::ok;
    };
    plan_ = &plan;
    Status status = Status::ok;
    if (lars) {
        status = pass(Verb::norms);
        std::vector<Squares> total(tensors, Squares{0, 0});
        for (std::size_t c = 0; c < plan.chunks.size() && status == Status::ok; ++c) {
            total[plan.chunks[c].tensor].w += plan.squares[c].w;
            total[plan.chunks[c].tensor].g += plan.squares[c].g;
        }
        for (std::size_t t = 0; t < tensors; ++t) {
            const double norm_w = std::sqrt(total[t].w), norm_g = std::sqrt(total[t].g);
            if (rows[t].lars == 0 || rows[t].trust == 0 || norm_w == 0 || norm_g == 0) continue;
            const double ratio = rows[t].trust * norm_w / (norm_g + rows[t].weight_decay * norm_w + rows[t].eps);
            plan.rules[t].ratio = static_cast<float>(ratio);
        }
    }
    if (status == Status::ok) status = pass(Verb::update);
    plan_ = nullptr;
    return status;
}

void Team::work_on_plan(const Call& call, std::size_t first, std::size_t last) {
    const Plan& plan = *plan_;
    const float* gradients[max_ranks];
    for (std::size_t c = first; c < last; ++c) {
        const Plan::Chunk& chunk = plan.chunks[c];
        for (int r = 0; r < size_; ++r)
            gradients[r] = reinterpret_cast<const float*>(plan.gradients->part(r) + plan.offset) + chunk.first;
        float* w = plan.parameters + chunk.first;
        if (call.verb == Verb::update)
            kernels().update(w, plan.velocities + chunk.first, gradients, size_, chunk.count, plan.rules[chunk.tensor]);
        else if (plan.rules[chunk.tensor].lars)
            plan.squares[c] = kernels().norms(w, gradients, size_, chunk.count, plan.scale);
        else
            plan.squares[c] = {0, 0};
    }
}

}  // namespace phalanx
