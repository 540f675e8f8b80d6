// Adam and AdamW on float32: a tensor's row in the table, and its update rule.
#pragma once

#include <iterator>

#include "kernels.hpp"
#include "rows.hpp"

namespace phalanx {

struct AdamRow {
    double offset, count;  // elements of the flat buffers
    double lr, beta1, beta2, eps, weight_decay;
    double decoupled;  // whether the decay shrinks the weight (AdamW) instead of joining the gradient (Adam)
    double step;       // number of this tensor's steps, including this one
};
constexpr const char* adam_row_fields[] = {"offset", "count", "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "step"};
static_assert(sizeof(AdamRow) == sizeof(double) * std::size(adam_row_fields), "Python fills a row field by field");

AdamRule rule_of(const AdamRow& row, double scale);

}  // namespace phalanx
