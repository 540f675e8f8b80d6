// Shared by the files of the extension: exceptions, the two types, and how a call of a team runs.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <exception>

#include "team.hpp"

namespace phalanx {

PyObject* raise_current();  // turn the current C++ exception into a Python one; returns null
PyObject* raise_again(const std::exception_ptr& thrown);

PyObject* make_arena_type();
PyObject* arena_object(const Arena& arena, int rank);  // this rank's part as a buffer that keeps the mapping alive

struct TeamObject {
    PyObject_HEAD
    Team* team;  // null after leave()
    std::atomic<bool> busy;
};

PyObject* make_team_type();
inline TeamObject* as_team(PyObject* object) { return reinterpret_cast<TeamObject*>(object); }

// Whether a call may begin; sets an exception if not. Marks the team as busy.
bool usable(TeamObject* self);


// Run `work` without the GIL. False, with an exception set, if it or a signal handler raised.
template <class Work>
bool run(TeamObject* self, Work work) {
    if (!usable(self)) return false;
    std::exception_ptr thrown;
    Py_BEGIN_ALLOW_THREADS
    try {
        work(*self->team);
    } catch (...) {
        thrown = std::current_exception();
    }
    Py_END_ALLOW_THREADS
    self->busy.store(false);
    if (thrown) raise_again(thrown);
    return PyErr_Occurred() == nullptr;
}

template <class Work>
PyObject* run_for_status(TeamObject* self, Work work) {
    Status status = Status::ok;
    if (!run(self, [&](Team& team) { status = work(team); })) return nullptr;
    return PyLong_FromUnsignedLong(static_cast<unsigned long>(status));
}

extern PyMethodDef team_methods[];  // the table, in python_calls.cpp
PyObject* team_meet(PyObject* object, PyObject*);
PyObject* team_leave(PyObject* object, PyObject*);
PyObject* team_abort(PyObject* object, PyObject*);
PyObject* team_set_long_pieces(PyObject* object, PyObject*);

}  // namespace phalanx
