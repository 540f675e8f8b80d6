// 8-bit codes of float32 as Python calls them. kernels.hpp has the arithmetic, src/phalanx/comm/block_code.py the meaning.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace phalanx {

extern PyMethodDef code_methods[];  // ends with an empty entry

}  // namespace phalanx
