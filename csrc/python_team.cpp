// phalanx._native.Team: entering, interrupting and leaving a team. Its calls are in python_calls.cpp.
#include <memory>
#include <stdexcept>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "arguments.hpp"
#include "python.hpp"

namespace phalanx {

bool usable(TeamObject* self) {
    if (self->team == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this rank has left the team");
        return false;
    }
    if (self->team->forked()) {
        PyErr_SetString(PyExc_RuntimeError, "this team belongs to the process that this one was forked from");
        return false;
    }
    if (self->busy.exchange(true)) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this team: one at a time, in one order on all ranks");
        return false;
    }
    return true;
}

PyObject* team_leave(PyObject* object, PyObject*) {
    TeamObject* self = as_team(object);
    if (self->team == nullptr) Py_RETURN_NONE;
    self->team->abort();  // a call in another thread ends within 50 ms
    while (self->busy.exchange(true)) {
        Py_BEGIN_ALLOW_THREADS
        usleep(1000);
        Py_END_ALLOW_THREADS
        if (self->team == nullptr) Py_RETURN_NONE;
    }
    self->team->leave();
    delete self->team;
    self->team = nullptr;
    self->busy.store(false);
    Py_RETURN_NONE;
}

PyObject* team_meet(PyObject* object, PyObject*) {
    if (!run(as_team(object), [](Team& team) {
            team.control().forget_place();
            team.meet();
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* team_abort(PyObject* object, PyObject*) {
    if (as_team(object)->team != nullptr) as_team(object)->team->abort();
    Py_RETURN_NONE;
}

PyObject* team_set_long_pieces(PyObject* object, PyObject*) {
    if (!run(as_team(object), [](Team& team) { team.set_long_pieces(); })) return nullptr;
    Py_RETURN_NONE;
}

namespace {

constexpr double longest_timeout = 1e9;  // seconds: in nanoseconds it fits 64 bits

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Ctrl-C must work during a wait. Only the main thread runs signal handlers, so the others do not even take the GIL.
bool interrupted() {
    if (!on_main_thread()) return false;
    const PyGILState_STATE state = PyGILState_Ensure();
    const bool raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return raised;
}

int team_init(PyObject* object, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"rank", "size", "place", "method", "timeout", nullptr};
    int rank = 0, size = 0, method = 0;
    const char* told = nullptr;
    double timeout = 60.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiz|id", const_cast<char**>(names), &rank, &size, &told, &method, &timeout)) {
        as_value_error();
        return -1;
    }
    if (size < 1 || size > max_ranks || rank < 0 || rank >= size || method < 0 || method > 1) {
        PyErr_Format(PyExc_ValueError, "rank %d of %d, method %d: a team has 1 to %d ranks", rank, size, method, max_ranks);
        return -1;
    }
    if (!(timeout > 0 && timeout <= longest_timeout)) {  // false for NaN
        PyErr_SetString(PyExc_ValueError, "timeout: seconds, more than 0 and at most 1e9");
        return -1;
    }
    TeamObject* self = as_team(object);
    try {
        const std::size_t bytes = round_to_pages(Team::control_bytes(size));
        std::shared_ptr<Segment> control =
            told == nullptr ? Segment::create(bytes, static_cast<Method>(method)) : Segment::open(Place::parse(told), bytes);
        delete self->team;
        self->team = new Team(control, rank, size);
        self->team->set_method(control->place().method);
        self->team->set_timeout(timeout);
        self->team->set_interrupt(interrupted);
    } catch (...) {
        raise_current();
        return -1;
    }
    return 0;
}

void team_dealloc(PyObject* object) {
    TeamObject* self = as_team(object);
    if (self->team != nullptr) self->team->leave();
    delete self->team;
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* team_place(PyObject* object, void*) {
    TeamObject* self = as_team(object);
    return PyUnicode_FromString(self->team == nullptr ? "" : self->team->control().place().text().c_str());
}

PyGetSetDef team_attributes[] = {
    {"place", team_place, nullptr, "where the others open the control segment", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot team_slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(team_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(team_dealloc)},
    {Py_tp_methods, team_methods},
    {Py_tp_getset, team_attributes},
    {Py_tp_doc, const_cast<char*>("The ranks of one host that share memory.")},
    {0, nullptr},
};
PyType_Spec team_spec = {"phalanx._native.Team", sizeof(TeamObject), 0, Py_TPFLAGS_DEFAULT, team_slots};

}  // namespace

PyObject* make_team_type() { return PyType_FromSpec(&team_spec); }

}  // namespace phalanx
