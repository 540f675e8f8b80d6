// The fused update by Adam's or AdamW's rule: one pass, two moments per parameter.
#include "adam.hpp"

#include <vector>

#include "plan.hpp"

namespace phalanx {

AdamRule rule_of(const AdamRow& row, double scale) {
    const double correction1 = 1 - std::pow(row.beta1, row.step), correction2 = 1 - std::pow(row.beta2, row.step);
    AdamRule rule;
    rule.take1 = static_cast<float>(1 - row.beta1);
    rule.beta2 = static_cast<float>(row.beta2);
    rule.take2 = static_cast<float>(1 - row.beta2);
    rule.l2 = static_cast<float>(row.decoupled != 0 ? 0 : row.weight_decay);
    rule.keep = static_cast<float>(row.decoupled != 0 ? 1 - row.lr * row.weight_decay : 1);
    rule.rate = static_cast<float>(row.lr / correction1);
    rule.correction = static_cast<float>(1 / std::sqrt(correction2));
    rule.eps = static_cast<float>(row.eps);
    rule.scale = static_cast<float>(scale);
    return rule;
}

struct Team::AdamPlan : Team::Plan {
    float *parameters, *first, *second;
    std::vector<AdamRule> rules;  // per tensor

    void work(Verb, std::size_t c, const float* const* sources, int ranks) const override {
        const Chunk& chunk = chunks[c];
        kernels().adam(parameters + chunk.first, first + chunk.first, second + chunk.first, sources, ranks, chunk.count,
                       rules[chunk.tensor]);
    }
};

Status Team::update(const FusedAdam& what) {
    AdamPlan plan;
    plan.cut(what.rows, what.tensors);
    Call call;
    std::uint64_t w = 0, m = 0, v = 0;
    const std::size_t bytes = plan.end * sizeof(float);
    if (!locate(what.gradients, bytes, call)) return refuse("the gradients of a fused update lie in an arena");
    if (!locate_one_for_all(what.parameters, bytes, w) || !locate_one_for_all(what.first, bytes, m) ||
        !locate_one_for_all(what.second, bytes, v))
        return refuse("the parameters and moments of a fused update lie in memory that is one for all ranks");
    plan.make_chunks(what.rows, what.tensors);
    for (std::size_t t = 0; t < what.tensors; ++t) plan.rules.push_back(rule_of(what.rows[t], what.scale));
    call.type = Type::f32;
    call.count = plan.chunks.size();
    call.scale = what.scale;
    call.digest = digest_of(what.rows, what.tensors * sizeof(AdamRow), (w * 31 + m) * 31 + v);
    plan.gradients = &arena(call.arena);
    plan.offset = call.offset;
    plan.parameters = what.parameters;
    plan.first = what.first;
    plan.second = what.second;
    plan.scale = what.scale;
    return pass(plan, call, Verb::update);
}

}  // namespace phalanx
