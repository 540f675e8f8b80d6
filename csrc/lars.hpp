// LARS on float32: the trust ratio, and how to correct a step that used an outdated norm.
//
// Where all ranks share one copy of w (update.cpp), |w| needs no pass of its own: an update sums the squares of what it writes,
// and the next update uses them as |w|^2. A program may write to w in between. So an update also sums the squares of what it
// reads. If they differ from those used for the ratio, the tensor is moved by the difference. The program need not report its
// writes, and none is missed: a change that leaves |w| as it is needs no correction.
#pragma once

#include <iterator>

#include "kernels.hpp"
#include "rows.hpp"

namespace phalanx {

// One row of an update's table: a tensor and its update rule. All numbers are doubles, so that Python passes one matrix.
struct TensorRow {
    double offset, count;  // elements of the flat buffers
    double lr, momentum, weight_decay, nesterov;
    double lr_in_momentum;       // whether the velocity includes the rate
    double adapted, trust, eps;  // the trust ratio, if `adapted`
};
constexpr const char* tensor_row_fields[] = {"offset",         "count",   "lr",    "momentum", "weight_decay", "nesterov",
                                             "lr_in_momentum", "adapted", "trust", "eps"};
static_assert(sizeof(TensorRow) == sizeof(double) * std::size(tensor_row_fields), "Python fills a row field by field");

// trust * |w| / (|g| + weight_decay * |w| + eps); 1 if |w| or |g| is zero or the tensor is not adapted.
double ratio_of(const TensorRow& row, double w_squared, double g_squared);
Rule rule_of(const TensorRow& row, double ratio, double scale);

// Whether |w|^2 of the previous update can be used. A ratio made of zero, infinity or NaN could not be corrected.
bool can_be_carried(double w_squared);

// Correct an update by `done` to one by `wanted`, which has another step; exact up to the rounding of w and v.
void repair(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& done,
            const Rule& wanted);

// One step of tensors of one process, at any address. It carries no norms over: ranks with a copy each must compute the same bits,
// whatever happened to their copies before.
struct OwnTensor {
    float *w, *velocity;
    const float* gradient;
};
void lars_step(const OwnTensor* tensors, const TensorRow* rows, std::size_t count);

}  // namespace phalanx
