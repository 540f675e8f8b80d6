// Encode, add and decode, without the GIL: other threads of the process keep computing.
#include "arguments.hpp"
#include "codes.hpp"
#include "kernels.hpp"

namespace phalanx {

namespace {

constexpr long most_block = 65536;  // numbers; the kernels have a buffer for one block

std::size_t block_at(Arguments& args, int i) {
    const std::size_t block = args.at_most(i, most_block);
    if (args.good && (block == 0 || block % 16 != 0)) {
        PyErr_Format(PyExc_ValueError, "a block has a multiple of 16 numbers, got %zu", block);
        args.good = false;
    }
    return block;
}

PyObject* encode_blocks(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(8)) return nullptr;
    const std::size_t count = args.elements(3);
    const float* x = static_cast<const float*>(args.address(0, count));
    float* error = static_cast<float*>(args.address(1));
    char* out = static_cast<char*>(args.address(2, count));
    Coding coding;
    coding.block = block_at(args, 4);
    coding.stochastic = args.below(5, 2) != 0;
    coding.key = static_cast<std::uint32_t>(args.at_most(6, 0xFFFFFFFF));
    coding.at = static_cast<std::uint32_t>(args.at_most(7, 0xFFFFFFFF));
    if (!args.good) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    kernels().encode(x, error, out, count, coding);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* add_blocks(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(5)) return nullptr;
    const std::size_t sources = args.at_most(1, 1 << 20), count = args.elements(3);
    const char* const* source = static_cast<const char* const*>(args.address(0, sources));
    float* x = static_cast<float*>(args.address(2, count));
    const std::size_t block = block_at(args, 4);
    if (!args.good) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    kernels().add_codes(source, static_cast<int>(sources), x, count, block);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* decode_blocks(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(5)) return nullptr;
    const std::size_t count = args.elements(2);
    const char* code = static_cast<const char*>(args.address(0, count));
    float* x = static_cast<float*>(args.address(1, count));
    const std::size_t block = block_at(args, 3);
    const float factor = static_cast<float>(args.real(4));
    if (!args.good) return nullptr;
    Py_BEGIN_ALLOW_THREADS
    kernels().decode(code, x, count, block, factor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef code_methods[] = {
    {"encode_blocks", fast(encode_blocks), METH_FASTCALL,
     "(x, error, out, count, block, stochastic, key, at): the code of x + error, and what was rounded away; error may be 0"},
    {"add_blocks", fast(add_blocks), METH_FASTCALL, "(codes, number, x, count, block): x += what the codes stand for"},
    {"decode_blocks", fast(decode_blocks), METH_FASTCALL, "(code, x, count, block, factor): x = factor * what it stands for"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace phalanx
