// Advance and expand low-rank gradients, without the GIL: other threads of the process keep computing.
#include "arguments.hpp"
#include "codes.hpp"
#include "kernels.hpp"

namespace phalanx {

namespace {

// rows, columns and rank from argument i on; `elements` is how many numbers the matrix has.
Shape shape_at(Arguments& args, int i, std::size_t& elements) {
    const Shape shape{args.elements(i), args.elements(i + 1), args.at_most(i + 2, 1 << 20)};
    elements = 0;
    if (args.good && __builtin_mul_overflow(shape.rows, shape.columns, &elements)) elements = most_elements + 1;
    if (args.good && (elements > most_elements || shape.rank == 0)) {
        PyErr_Format(PyExc_ValueError, "a matrix of %zu x %zu with %zu columns for each", shape.rows, shape.columns, shape.rank);
        args.good = false;
    }
    return shape;
}

PyObject* advance_matrix(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(7)) return nullptr;
    std::size_t elements;
    const Shape shape = shape_at(args, 4, elements);
    const float* x = static_cast<const float*>(args.address(0));
    float* m = static_cast<float*>(args.address(1, elements));
    float* p = static_cast<float*>(args.address(2, elements));
    const float* q = static_cast<const float*>(args.address(3, elements));
    if (!args.good) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    kernels().advance(x, m, p, q, shape);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* expand_matrix(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(7)) return nullptr;
    std::size_t elements;
    const Shape shape = shape_at(args, 3, elements);
    const float* p = static_cast<const float*>(args.address(0, elements));
    const float* q = static_cast<const float*>(args.address(1, elements));
    float* x = static_cast<float*>(args.address(2, elements));
    const float factor = static_cast<float>(args.real(6));
    if (!args.good) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    kernels().expand(p, q, x, shape, factor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef low_rank_methods[] = {
    {"advance_matrix", fast(advance_matrix), METH_FASTCALL,
     "(x, m, p, q, rows, columns, rank): m = m - p q + x, then p = m q'; x may be 0"},
    {"expand_matrix", fast(expand_matrix), METH_FASTCALL, "(p, q, x, rows, columns, rank, factor): x = factor * p q"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace phalanx
