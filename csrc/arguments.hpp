// Read the numbers that Python passes, one by one: a whole call must cost about a microsecond.
//
// An impossible number raises a ValueError here. Deeper in the core, an address or a size that wraps around would write to
// foreign memory.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace phalanx {

// The most elements whose total bytes, in the widest type on the most ranks, fit a signed size: no later computation overflows.
constexpr std::size_t most_elements = PTRDIFF_MAX / (8 * 256);

// Turn an OverflowError of Python's conversions into a ValueError, as for any other number out of range.
inline void as_value_error() {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return;
    PyErr_Clear();
    PyErr_SetString(PyExc_ValueError, "a number is negative or too large");
}

struct Arguments {
    PyObject* const* values;
    Py_ssize_t count;
    bool good = true;

    bool expect(Py_ssize_t n) {
        if (count != n) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", n, count);
        return count == n;
    }

    std::size_t size(int i) {
        const std::size_t n = PyLong_AsSize_t(values[i]);
        if (n == static_cast<std::size_t>(-1) && PyErr_Occurred()) fail();
        return n;
    }

    std::size_t at_most(int i, std::size_t limit) {
        const std::size_t n = size(i);
        if (good && n > limit) {
            PyErr_Format(PyExc_ValueError, "argument %d is %zu, must be in 0..%zu", i, n, limit);
            good = false;
        }
        return n;
    }

    std::size_t elements(int i) { return at_most(i, most_elements); }

    // A null address is allowed only if `elements`, what the call reads or writes, is 0.
    void* address(int i, std::size_t elements = 0) {
        const std::size_t at = at_most(i, PTRDIFF_MAX);  // the upper half belongs to the kernel
        if (good && at == 0 && elements != 0) {
            PyErr_Format(PyExc_ValueError, "argument %d: %zu elements at address 0", i, elements);
            good = false;
        }
        return reinterpret_cast<void*>(at);
    }

    long below(int i, long limit) { return static_cast<long>(at_most(i, static_cast<std::size_t>(limit) - 1)); }

    double real(int i) {
        const double value = PyFloat_AsDouble(values[i]);
        if (value == -1.0 && PyErr_Occurred()) fail();
        return value;
    }

  private:
    void fail() {
        as_value_error();
        good = false;
    }
};

// A function with METH_FASTCALL in the type that PyMethodDef has for all functions.
inline PyCFunction fast(PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(call));
}

}  // namespace phalanx
