// phalanx._native.Arena: this rank's part of memory that all ranks map, as a writable buffer.
#include <new>

#include "python.hpp"

namespace phalanx {
namespace {

struct ArenaObject {
    PyObject_HEAD
    Arena arena;
    int rank;
};

void arena_dealloc(PyObject* object) {
    reinterpret_cast<ArenaObject*>(object)->arena.~Arena();
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

int arena_buffer(PyObject* object, Py_buffer* view, int flags) {
    ArenaObject* self = reinterpret_cast<ArenaObject*>(object);
    return PyBuffer_FillInfo(view, object, self->arena.part(self->rank), static_cast<Py_ssize_t>(self->arena.bytes), 0, flags);
}

PyObject* arena_id(PyObject* object, void*) { return PyLong_FromUnsignedLong(reinterpret_cast<ArenaObject*>(object)->arena.id); }

PyGetSetDef arena_attributes[] = {
    {"id", arena_id, nullptr, "its number, the same on all ranks", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot arena_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(arena_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(arena_buffer)},
    {Py_tp_getset, arena_attributes},
    {Py_tp_doc, const_cast<char*>("This rank's part of memory that all ranks of a team map; a writable buffer.")},
    {0, nullptr},
};
PyType_Spec arena_spec = {"phalanx._native.Arena", sizeof(ArenaObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                          arena_slots};
PyTypeObject* arena_type = nullptr;

}  // namespace

PyObject* make_arena_type() {
    PyObject* type = PyType_FromSpec(&arena_spec);
    arena_type = reinterpret_cast<PyTypeObject*>(type);
    return type;
}

PyObject* arena_object(const Arena& arena, int rank) {
    ArenaObject* made = PyObject_New(ArenaObject, arena_type);
    if (made == nullptr) return nullptr;
    new (&made->arena) Arena(arena);
    made->rank = rank;
    return reinterpret_cast<PyObject*>(made);
}

}  // namespace phalanx
