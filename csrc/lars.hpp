// LARS on float32: how far a tensor moves, and how a step is repaired that used a norm which was no longer true.
//
// Where all ranks have one copy of w (update.cpp), |w| costs no pass of its own: an update sums the squares of what it writes,
// and the next one takes them for |w|^2. A program may have written to w in between. So an update also sums the squares of what it
// finds: where they are others than those that the ratio was made of, the tensor is moved by the difference. No one has to tell
// us, and nothing is missed: a change that leaves |w| as it is needs no repair.
#pragma once

#include <iterator>

#include "kernels.hpp"
#include "rows.hpp"

namespace phalanx {

// One row of the table of an update: a tensor, and how it moves. All numbers are doubles, so that Python hands over one matrix.
struct TensorRow {
    double offset, count;  // elements of the flat buffers
    double lr, momentum, weight_decay, nesterov;
    double lr_in_momentum;       // whether the velocity has the rate in it
    double adapted, trust, eps;  // the trust ratio, where `adapted`
};
constexpr const char* tensor_row_fields[] = {"offset",         "count",   "lr",    "momentum", "weight_decay", "nesterov",
                                             "lr_in_momentum", "adapted", "trust", "eps"};
static_assert(sizeof(TensorRow) == sizeof(double) * std::size(tensor_row_fields), "Python fills a row field by field");

// trust * |w| / (|g| + weight_decay * |w| + eps); 1 where |w| or |g| is zero, and where the tensor is not adapted.
double ratio_of(const TensorRow& row, double w_squared, double g_squared);
Rule rule_of(const TensorRow& row, double ratio, double scale);

// Whether |w|^2 may be taken from the update before. A ratio made of zero, infinity or NaN could not be repaired.
bool can_be_carried(double w_squared);

// What was moved by `done` is as if it had been moved by `wanted`, which differs in its step; to the rounding of w and v.
void repair(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& done,
            const Rule& wanted);

// One step of tensors of one process, wherever they lie. It carries nothing: ranks with a copy each must find the same bits,
// whatever happened to their copies before.
struct OwnTensor {
    float *w, *velocity;
    const float* gradient;
};
void lars_step(const OwnTensor* tensors, const TensorRow* rows, std::size_t count);

}  // namespace phalanx
