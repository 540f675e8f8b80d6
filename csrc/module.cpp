// phalanx._native: the team as Python sees it. Typed by src/phalanx/_native.pyi; phalanx/comm/transports/shm.py is its only user.
//
// Tensors come as address and count. A collective returns its Status as an int, 0 if all is well, and `failure` tells the rest:
// words are made where the words of all transports are made, in Python. No call holds the GIL while it waits or works.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <sys/syscall.h>
#include <unistd.h>

#include "arguments.hpp"
#include "team.hpp"

namespace {

using namespace phalanx;

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

// ---- Arena: this rank's part, as a buffer that keeps the mapping alive ------------------------------------------------------

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

// ---- Team --------------------------------------------------------------------------------------------------------------------

struct TeamObject {
    PyObject_HEAD
    Team* team;  // null after leave()
    std::atomic<bool> busy;
};

constexpr double longest_timeout = 1e9;  // seconds: in nanoseconds it fits 64 bits

TeamObject* as_team(PyObject* object) { return reinterpret_cast<TeamObject*>(object); }

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Ctrl-C must work in the middle of a wait. Only the main thread runs signal handlers: the others do not even ask for the GIL.
bool interrupted() {
    if (!on_main_thread()) return false;
    const PyGILState_STATE state = PyGILState_Ensure();
    const bool raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return raised;
}

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

// Run `work` without the GIL; false with an exception set if it threw or a signal handler did.
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

PyObject* team_leave(PyObject* object, PyObject*) {
    TeamObject* self = as_team(object);
    if (self->team == nullptr) Py_RETURN_NONE;
    self->team->abort();  // a call that another thread is in ends within 50 ms
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

void team_dealloc(PyObject* object) {
    TeamObject* self = as_team(object);
    if (self->team != nullptr) self->team->leave();
    delete self->team;
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
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

// What the calls that follow are about: a digest of it, and its number.
bool set_topic(PyObject* object, PyObject* const* values) {
    Arguments args{values, 2};
    const std::uint64_t digest = args.size(0), number = args.size(1);
    if (!args.good) return false;
    Team* team = as_team(object)->team;
    if (team != nullptr) team->set_topic(digest ^ number * 0x9E3779B97F4A7C15u);  // the golden ratio: numbers differ in all bits
    return true;
}

struct Reduction {
    void* x;
    std::size_t count;
    Type type;
    Op op;
    double scale;
    bool good;

    Reduction(PyObject* const* values, Py_ssize_t n) {
        Arguments args{values, n};
        good = args.expect(5);
        if (!good) return;
        count = args.elements(1);
        x = args.address(0, count);
        type = static_cast<Type>(args.below(2, types));
        op = static_cast<Op>(args.below(3, ops));
        scale = args.real(4);
        good = args.good;
        if (good && scale != 1.0 && (type >= Type::i8 || op != Op::sum)) {
            PyErr_SetString(PyExc_ValueError, "a scale is for sums of floating point numbers");
            good = false;
        }
    }
};

PyObject* team_all_reduce(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    const Reduction r(values, n == 7 ? 5 : n);
    if (!r.good || (n == 7 && !set_topic(object, values + 5))) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.all_reduce(r.x, r.count, r.type, r.op, r.scale); });
}

PyObject* team_reduce_scatter(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    const Reduction r(values, n);
    if (!r.good) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.reduce_scatter(r.x, r.count, r.type, r.op, r.scale); });
}

PyObject* team_all_gather(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(3)) return nullptr;
    const std::size_t count = args.elements(1);
    void* x = args.address(0, count);
    const Type type = static_cast<Type>(args.below(2, types));
    if (!args.good) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.all_gather(x, count, type); });
}

PyObject* team_broadcast(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    TeamObject* self = as_team(object);
    if (!args.expect(4)) return nullptr;
    const std::size_t count = args.elements(1);
    void* x = args.address(0, count);
    const Type type = static_cast<Type>(args.below(2, types));
    const int root = static_cast<int>(args.below(3, self->team == nullptr ? max_ranks : self->team->size()));
    if (!args.good) return nullptr;
    return run_for_status(self, [&](Team& team) { return team.broadcast(x, count, type, root); });
}

PyObject* team_update(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(8)) return nullptr;
    FusedUpdate what;
    what.gradients = static_cast<const float*>(args.address(0));
    what.parameters = static_cast<float*>(args.address(1));
    what.velocities = static_cast<float*>(args.address(2));
    what.squares = static_cast<ChunkSquares*>(args.address(3));
    what.carry = args.below(4, 2) != 0;
    what.tensors = args.at_most(6, UINT32_MAX);
    what.rows = static_cast<const TensorRow*>(args.address(5, what.tensors));
    what.scale = args.real(7);
    if (!args.good) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.update(what); });
}

PyObject* team_update_adam(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(7)) return nullptr;
    FusedAdam what;
    what.gradients = static_cast<const float*>(args.address(0));
    what.parameters = static_cast<float*>(args.address(1));
    what.first = static_cast<float*>(args.address(2));
    what.second = static_cast<float*>(args.address(3));
    what.tensors = args.at_most(5, UINT32_MAX);
    what.rows = static_cast<const AdamRow*>(args.address(4, what.tensors));
    what.scale = args.real(6);
    if (!args.good) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.update(what); });
}

PyObject* team_set_topic(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(2) || !set_topic(object, values)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* team_barrier(PyObject* object, PyObject*) {
    return run_for_status(as_team(object), [](Team& team) { return team.barrier(); });
}

PyObject* team_allocate(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(2)) return nullptr;
    const std::size_t bytes = args.elements(0);
    const bool one_for_all = args.below(1, 2) != 0;
    if (!args.good) return nullptr;
    TeamObject* self = as_team(object);
    Arena arena;
    Status status = Status::ok;
    if (!run(self, [&](Team& team) { status = team.allocate(bytes, one_for_all, arena); })) return nullptr;
    if (status != Status::ok) return Py_BuildValue("IO", static_cast<unsigned>(status), Py_None);
    ArenaObject* made = PyObject_New(ArenaObject, arena_type);
    if (made == nullptr) return nullptr;
    new (&made->arena) Arena(arena);
    made->rank = self->team->rank();
    return Py_BuildValue("IN", static_cast<unsigned>(status), made);
}

PyObject* team_release(PyObject* object, PyObject* id) {
    Arguments args{&id, 1};
    const std::size_t number = args.at_most(0, UINT32_MAX);
    if (!args.good) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) { return team.release(static_cast<std::uint32_t>(number)); });
}

PyObject* team_owns(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(2)) return nullptr;
    const void* x = args.address(0);
    const std::size_t bytes = args.size(1);
    if (!args.good) return nullptr;
    const Team* team = as_team(object)->team;
    return PyBool_FromLong(team != nullptr && team->owns(x, bytes));
}

PyObject* ranks(const std::vector<int>& found) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(found.size()));
    for (std::size_t i = 0; tuple != nullptr && i < found.size(); ++i)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyLong_FromLong(found[i]));
    return tuple;
}

PyObject* team_failure(PyObject* object, PyObject*) {
    TeamObject* self = as_team(object);
    if (self->team == nullptr) Py_RETURN_NONE;
    const Failure& failure = self->team->failure();
    PyObject* calls = PyTuple_New(static_cast<Py_ssize_t>(failure.calls.size()));
    for (std::size_t i = 0; calls != nullptr && i < failure.calls.size(); ++i) {
        const Call& call = failure.calls[i];
        PyTuple_SET_ITEM(calls, static_cast<Py_ssize_t>(i),
                         Py_BuildValue("iiiiIKIKd", static_cast<int>(call.verb), static_cast<int>(call.type),
                                       static_cast<int>(call.op), static_cast<int>(call.staged), call.root,
                                       static_cast<unsigned long long>(call.count), call.arena,
                                       static_cast<unsigned long long>(call.offset), call.scale));
    }
    return Py_BuildValue("iNNNs", failure.author, ranks(failure.dead), ranks(failure.late), calls, failure.refusal.c_str());
}

PyObject* team_place(PyObject* object, void*) {
    TeamObject* self = as_team(object);
    return PyUnicode_FromString(self->team == nullptr ? "" : self->team->control().place().text().c_str());
}

#define FAST(name) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(team_##name)), METH_FASTCALL

PyMethodDef team_methods[] = {
    {"meet", team_meet, METH_NOARGS, "All ranks have mapped the control segment: forget its place, watch the processes."},
    {"leave", team_leave, METH_NOARGS, "Leave the team; idempotent."},
    {"abort", team_abort, METH_NOARGS, "From any thread: calls of this rank, now and later, fail within 50 ms."},
    {"all_reduce", FAST(all_reduce), "(address, count, type, op, scale[, digest, number]) -> status; the last two as in set_topic"},
    {"reduce_scatter", FAST(reduce_scatter), "(address, count, type, op, scale) -> status"},
    {"all_gather", FAST(all_gather), "(address, count, type) -> status"},
    {"broadcast", FAST(broadcast), "(address, count, type, root) -> status"},
    {"update", FAST(update), "(gradients, parameters, velocities, squares, carry, rows, tensors, scale) -> status"},
    {"update_adam", FAST(update_adam), "(gradients, parameters, first, second, rows, tensors, scale) -> status"},
    {"set_topic", FAST(set_topic), "(digest, number): what the calls that follow are about; ranks that differ disagree"},
    {"barrier", team_barrier, METH_NOARGS, "() -> status"},
    {"allocate", FAST(allocate), "(bytes, one_for_all) -> (status, Arena or None)"},
    {"release", team_release, METH_O, "(arena id) -> status"},
    {"owns", FAST(owns), "(address, bytes) -> whether that lies in this rank's part of an arena"},
    {"failure", team_failure, METH_NOARGS, "(author, dead, late, calls, refusal) of the last call that failed"},
    {nullptr, nullptr, 0, nullptr},
};

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

// ---- the module --------------------------------------------------------------------------------------------------------------

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

PyObject* module_third_bytes(PyObject*, PyObject* ranks) {
    Arguments args{&ranks, 1};
    const long size = args.below(0, max_ranks + 1);
    if (!args.good) return nullptr;
    if (size == 0) return PyErr_Format(PyExc_ValueError, "a team has 1 to %d ranks", max_ranks);
    return PyLong_FromSize_t(third_bytes(static_cast<int>(size)));
}

PyObject* module_kernels(PyObject*, PyObject*) { return PyUnicode_FromString(kernels().name); }

PyMethodDef module_methods[] = {
    {"kernels", module_kernels, METH_NOARGS, "avx512, avx2 or portable: what this process computes with"},
    {"choose_kernels", module_choose_kernels, METH_O, "(name) -> whether this processor has them; for tests and comparisons"},
    {"third_bytes", module_third_bytes, METH_O, "(ranks) -> bytes of one piece of a tensor that passes through the staging area"},
    {"lars_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(module_lars_step)), METH_FASTCALL,
     "(tensors, rows, count): one step of tensors of this process"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "phalanx._native", "Shared-memory collectives of one host.", -1, module_methods,
                          nullptr, nullptr, nullptr, nullptr};

// The names of an enum or of the fields of a row, in the order of their numbers.
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
    PyObject* arena = PyType_FromSpec(&arena_spec);
    PyObject* team = PyType_FromSpec(&team_spec);
    arena_type = reinterpret_cast<PyTypeObject*>(arena);
    // the layout of the control segment: ranks that run different builds must not meet in one
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
