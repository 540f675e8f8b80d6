// What compresses gradients, for Python. The arithmetic is in kernels.hpp; src/phalanx/comm/block_code.py defines the format of
// 8-bit codes, src/phalanx/grad/wires/low_rank.py that of thin matrices.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace phalanx {

// each ends with an empty entry
extern PyMethodDef code_methods[];
extern PyMethodDef low_rank_methods[];

}  // namespace phalanx
