// 8-bit codes of float32 for Python. The arithmetic is in kernels.hpp; src/phalanx/comm/block_code.py defines the format.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace phalanx {

extern PyMethodDef code_methods[];  // ends with an empty entry

}  // namespace phalanx
