// The arithmetic: one pass reads many buffers and writes the result to many. Compiled per instruction set, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

enum class Type : std::uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8 };
constexpr int types = 9;
// Python reads these names (torch's), so that no number has to be copied by hand.
constexpr const char* type_names[types] = {"float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"};
constexpr std::size_t size_of(Type type) {
    constexpr std::size_t sizes[types] = {4, 8, 2, 2, 1, 2, 4, 8, 1};
    return sizes[static_cast<int>(type)];
}

enum class Op : std::uint8_t { sum, max, min };
constexpr int ops = 3;
constexpr const char* op_names[ops] = {"sum", "max", "min"};

// dst[0..targets) = scale * (src[0] op src[1] op ... op src[sources-1]), elementwise, in exactly that order.
// A target may be one of the sources. Half-width floats are summed in float32 and rounded once. `scale` is for float sums only.
using Reduce = void (*)(void* const* dst, int targets, const void* const* src, int sources, std::size_t count, double scale);

// The update of one tensor. With d = scale * sum of gradients + weight_decay * w:
//   u = step * d;   v = momentum * v + u;   w -= rate * (nesterov ? u + momentum * v : v)
// torch.optim.SGD (dampening 0) has step 1 and rate lr; phalanx.Lars has step lr * ratio and rate 1, or step ratio and rate lr.
struct Rule {
    float step, rate, momentum, weight_decay, scale;
    bool nesterov;
};
using Update = void (*)(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& rule);

// Sums of squares of w, in double, before and after an update, with the same bits as Norms computes.
struct Moved {
    double before, after;
};
using UpdateAndSquare =
    Moved (*)(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& rule);

// Sums of squares, in double: of w (0 if null), and of scale * (sum of gradients).
struct Squares {
    double w, g;
};
using Norms = Squares (*)(const float* w, const float* const* gradients, int sources, std::size_t count, double scale);

// One step of Adam or AdamW. With g = scale * (sum of gradients) + l2 * w:
//   first += take1 * (g - first);   second = beta2 * second + take2 * g * g
//   w = keep * w - rate * first / (sqrt(second) * correction + eps)
// `take` is 1 - beta; `rate` and `correction` include the bias corrections; AdamW has l2 = 0, Adam has keep = 1.
struct AdamRule {
    float take1, beta2, take2, l2, keep, rate, correction, eps, scale;
};
using Adam = void (*)(float* w, float* first, float* second, const float* const* gradients, int sources, std::size_t count,
                      const AdamRule& rule);

// Copy to memory that other cores have read: prefetch each line, because a store to a line in another cache stalls.
using Put = void (*)(void* to, const void* from, std::size_t bytes);

// Put, interleaved line by line with another copy of the same length: one waits for memory while the other moves.
using Exchange = void (*)(void* put_to, const void* put_from, void* take_to, const void* take_from, std::size_t bytes);

// 8-bit codes of float32 in blocks with one scale each: a code of n numbers is one float32 per block, then n signed bytes.
// `at` is the position of the first number, which seeds stochastic rounding.
struct Coding {
    std::size_t block;
    bool stochastic;
    std::uint32_t key, at;
};
// Encode x + error, and leave the rounding error in `error`, which may be null.
using Encode = void (*)(const float* x, float* error, char* out, std::size_t count, const Coding& coding);
// x += the decoded codes, in order; x = factor * the decoded code.
using AddCodes = void (*)(const char* const* source, int sources, float* x, std::size_t count, std::size_t block);
using Decode = void (*)(const char* code, float* x, std::size_t count, std::size_t block, float factor);

// A matrix M of rows x columns, and its two thin ones: P of rows x rank, Q of rank x columns. All are stored row by row.
struct Shape {
    std::size_t rows, columns, rank;
};
// M = M - P Q + x, then P = M Q'. Without an x nothing is added.
using Advance = void (*)(const float* x, float* m, float* p, const float* q, const Shape& shape);
// x = factor * P Q, with the same bits for every instruction set.
using Expand = void (*)(const float* p, const float* q, float* x, const Shape& shape, float factor);

struct Kernels {
    const char* name;
    Reduce reduce[types][ops];
    Update update;
    UpdateAndSquare update_and_square;
    Norms norms;
    Adam adam;
    Put put;
    Exchange exchange;
    Encode encode;
    AddCodes add_codes;
    Decode decode;
    Advance advance;
    Expand expand;
};

const Kernels& kernels();            // the best for this processor, or the chosen ones
bool choose_kernels(const char* name);  // "avx512", "avx2" or "portable"; false if the processor lacks it

}  // namespace phalanx
