#include "lars.hpp"

#include <cmath>

namespace phalanx {

double ratio_of(const TensorRow& row, double w_squared, double g_squared) {
    if (row.adapted == 0 || w_squared == 0 || g_squared == 0) return 1;
    const double w = std::sqrt(w_squared), g = std::sqrt(g_squared);
    return row.trust * w / (g + row.weight_decay * w + row.eps);
}

Rule rule_of(const TensorRow& row, double ratio, double scale) {
    const bool inside = row.lr_in_momentum != 0;
    Rule rule;
    rule.step = static_cast<float>(inside ? row.lr * ratio : ratio);
    rule.rate = static_cast<float>(inside ? 1 : row.lr);
    rule.momentum = static_cast<float>(row.momentum);
    rule.weight_decay = static_cast<float>(row.weight_decay);
    rule.scale = static_cast<float>(scale);
    rule.nesterov = row.nesterov != 0;
    return rule;
}

bool can_be_carried(double w_squared) { return w_squared > 0 && std::isfinite(w_squared); }

// Rare, so in plain doubles: the old w is recovered as the new one plus its update.
void repair(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& done,
            const Rule& wanted) {
    const double momentum = done.momentum, decay = done.weight_decay, rate = done.rate, step = done.step;
    const double more = static_cast<double>(wanted.step) - step;
    for (std::size_t i = 0; i < count; ++i) {
        double g = 0;
        for (int r = 0; r < sources; ++r) g += gradients[r][i];
        g *= done.scale;
        const double v = velocity[i];
        // nesterov: w_old = w + rate * (momentum * v + step * (g + decay * w_old))
        const double old = done.nesterov ? (w[i] + rate * (momentum * v + step * g)) / (1 - rate * step * decay) : w[i] + rate * v;
        const double u = more * (g + decay * old);
        velocity[i] = static_cast<float>(v + u);
        w[i] = static_cast<float>(w[i] - rate * (done.nesterov ? u + momentum * u : u));
    }
}

// Compute a tensor's norms right before its update, which then finds much of it in the cache.
void lars_step(const OwnTensor* tensors, const TensorRow* rows, std::size_t count) {
    for (std::size_t t = 0; t < count; ++t) check_row(rows[t]);
    for (std::size_t t = 0; t < count; ++t) {
        const TensorRow& row = rows[t];
        const OwnTensor& own = tensors[t];
        const std::size_t elements = static_cast<std::size_t>(row.count);
        const Squares squares = row.adapted != 0 ? kernels().norms(own.w, &own.gradient, 1, elements, 1) : Squares{0, 0};
        const Rule rule = rule_of(row, ratio_of(row, squares.w, squares.g), 1);
        kernels().update(own.w, own.velocity, &own.gradient, 1, elements, rule);
    }
}

}  // namespace phalanx
