// phalanx._native: the native core as a Python module. Its types are in src/phalanx/_native.pyi; only phalanx.native imports it.
#include <new>
#include <stdexcept>

#include "arguments.hpp"
#include "codes.hpp"
#include "python.hpp"

namespace phalanx {

PyObject* raise_current() {
    try {
        throw;
    } catch (const SegmentError& error) {
        PyErr_SetString(PyExc_OSError, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyObject* raise_again(const std::exception_ptr& thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (...) {
        return raise_current();
    }
}

}  // namespace phalanx

namespace {

using namespace phalanx;

PyObject* module_choose_kernels(PyObject*, PyObject* name) {
    const char* text = PyUnicode_AsUTF8(name);
    return text == nullptr ? nullptr : PyBool_FromLong(choose_kernels(text));
}

PyObject* module_lars_step(PyObject*, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(3)) return nullptr;
    const std::size_t count = args.elements(2);
    const OwnTensor* tensors = static_cast<const OwnTensor*>(args.address(0, count));
    const TensorRow* rows = static_cast<const TensorRow*>(args.address(1, count));
    if (!args.good) return nullptr;
    std::exception_ptr thrown;
    Py_BEGIN_ALLOW_THREADS
    try {
        lars_step(tensors, rows, count);
    } catch (...) {
        thrown = std::current_exception();
    }
    Py_END_ALLOW_THREADS
    if (thrown) return raise_again(thrown);
    Py_RETURN_NONE;
}

PyObject* bytes_for(PyObject* ranks, std::size_t (*bytes)(int)) {
    Arguments args{&ranks, 1};
    const long size = args.below(0, max_ranks + 1);
    if (!args.good) return nullptr;
    if (size == 0) return PyErr_Format(PyExc_ValueError, "a team has 1 to %d ranks", max_ranks);
    return PyLong_FromSize_t(bytes(static_cast<int>(size)));
}

PyObject* module_third_bytes(PyObject*, PyObject* ranks) { return bytes_for(ranks, third_bytes); }
PyObject* module_whole_bytes(PyObject*, PyObject* ranks) { return bytes_for(ranks, whole_bytes); }

PyObject* module_kernels(PyObject*, PyObject*) { return PyUnicode_FromString(kernels().name); }

PyMethodDef module_methods[] = {
    {"kernels", module_kernels, METH_NOARGS, "the kernels in use: avx512, avx2 or portable"},
    {"choose_kernels", module_choose_kernels, METH_O, "(name) -> whether this processor has them; for tests and comparisons"},
    {"third_bytes", module_third_bytes, METH_O, "(ranks) -> bytes of one piece of a long tensor that passes through the stage"},
    {"whole_bytes", module_whole_bytes, METH_O, "(ranks) -> bytes up to which a tensor is all-reduced through the stage in one piece"},
    {"lars_step", fast(module_lars_step), METH_FASTCALL, "(tensors, rows, count): one step of tensors of this process"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "phalanx._native", "Shared-memory collectives of one host.", -1, module_methods,
                          nullptr, nullptr, nullptr, nullptr};

// The names of an enum or of the fields of a row, in numerical order.
template <std::size_t n>
bool add_names(PyObject* module, const char* name, const char* const (&names)[n]) {
    PyObject* tuple = PyTuple_New(n);
    for (std::size_t i = 0; tuple != nullptr && i < n; ++i)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyUnicode_FromString(names[i]));
    return PyModule_AddObject(module, name, tuple) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    if (PyModule_AddFunctions(module, code_methods) < 0 || PyModule_AddFunctions(module, low_rank_methods) < 0) return nullptr;
    PyObject* arena = make_arena_type();
    PyObject* team = make_team_type();
    // the layout of the control segment: ranks that run different builds must not share one
    const std::string layout = std::to_string(sizeof(Header)) + "." + std::to_string(sizeof(Member)) + "." +
                               std::to_string(Team::control_bytes(max_ranks)) + ".5";
    if (arena == nullptr || team == nullptr || PyModule_AddObject(module, "Arena", Py_NewRef(arena)) < 0 ||
        PyModule_AddObject(module, "Team", team) < 0 || PyModule_AddStringConstant(module, "LAYOUT", layout.c_str()) < 0 ||
        PyModule_AddIntConstant(module, "MAX_RANKS", max_ranks) < 0 ||
        PyModule_AddIntConstant(module, "CHUNK", chunk_elements) < 0 ||
        PyModule_AddIntConstant(module, "CHUNK_BYTES", chunk_bytes) < 0 ||
        PyModule_AddIntConstant(module, "SMALL_BYTES", small_bytes) < 0 ||
        PyModule_AddIntConstant(module, "FEW_BYTES", few_bytes) < 0 ||
        PyModule_AddIntConstant(module, "SQUARES", sizeof(ChunkSquares) / sizeof(double)) < 0 ||
        !add_names(module, "TYPES", type_names) || !add_names(module, "OPS", op_names) ||
        !add_names(module, "VERBS", verb_names) || !add_names(module, "STATUSES", status_names) ||
        !add_names(module, "SGD_ROW", tensor_row_fields) || !add_names(module, "ADAM_ROW", adam_row_fields))
        return nullptr;
    return module;
}