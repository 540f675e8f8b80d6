// The calls of phalanx._native.Team. Tensors are passed as address and count. A collective returns its Status as an int, 0 for
// success; `failure` has the details, and Python writes the message. No call holds the GIL while it waits or works.
#include "arguments.hpp"
#include "python.hpp"

namespace phalanx {
namespace {

// Set the topic of the calls that follow: a digest and a number.
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

PyObject* team_all_reduce_or_begin(PyObject* object, PyObject* const* values, Py_ssize_t n) {
    Arguments args{values, n};
    if (!args.expect(8)) return nullptr;
    const std::int64_t patience = static_cast<std::int64_t>(args.at_most(7, INT64_MAX));
    const Reduction r(values, 5);
    if (!r.good || !args.good || !set_topic(object, values + 5)) return nullptr;
    return run_for_status(as_team(object), [&](Team& team) {
        return team.all_reduce_or_begin(r.x, r.count, r.type, r.op, r.scale, patience);
    });
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
    PyObject* made = arena_object(arena, self->team->rank());
    if (made == nullptr) return nullptr;
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

}  // namespace

#define FAST(name) fast(team_##name), METH_FASTCALL

PyMethodDef team_methods[] = {
    {"meet", team_meet, METH_NOARGS, "All ranks have mapped the control segment: forget its place, watch the processes."},
    {"leave", team_leave, METH_NOARGS, "Leave the team; idempotent."},
    {"abort", team_abort, METH_NOARGS, "From any thread: calls of this rank, now and later, fail within 50 ms."},
    {"set_long_pieces", team_set_long_pieces, METH_NOARGS, "On all ranks: pass long tensors in pieces of whole_bytes(ranks)."},
    {"all_reduce", FAST(all_reduce), "(address, count, type, op, scale[, digest, number]) -> status; the last two as in set_topic"},
    {"all_reduce_or_begin", FAST(all_reduce_or_begin),
     "(address, count, type, op, scale, digest, number, nanoseconds) -> status; `begun`: call all_reduce alike to finish it"},
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

}  // namespace phalanx
