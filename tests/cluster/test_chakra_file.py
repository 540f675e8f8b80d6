"""Execution traces of Chakra as workloads: protobuf, compressed protobuf and JSON say the same as torch.profiler's own trace."""

import gzip
import json
import zlib

import pytest
from tests.cluster.test_trace_file import event

from phalanx.cli.main import main
from phalanx.cluster.chakra_file import from_chakra, is_chakra
from phalanx.cluster.trace_file import from_trace

BACK, GRADIENT, UPDATE = "autograd::engine::evaluate_function: x", "torch::autograd::AccumulateGrad", "Optimizer.step#SGD.step"
# number, name, type, after, start, duration, shapes, is_cpu_op
STEP = [
    (1, "aten::linear", "COMP_NODE", [], 10, 5, "[[4, 3], [4, 3]]", True),
    (2, "forward", "COMP_NODE", [1], 50, 100, "", False),
    (3, BACK, "COMP_NODE", [1], 20, 5, "", True),
    (4, "back", "COMP_NODE", [3], 150, 60, "", False),
    (5, GRADIENT, "COMP_NODE", [3], 26, 1, "[[3, 4]]", True),
    (6, "ncclDevKernel_AllReduce", "COMM_COLL_NODE", [5], 160, 900, "", False),
    (7, "aten::mm", "COMP_NODE", [5], 28, 1, "", True),
    (8, "back", "COMP_NODE", [7], 210, 40, "", False),
    (9, GRADIENT, "COMP_NODE", [7], 30, 1, "[[5]]", True),
    (10, UPDATE, "COMP_NODE", [], 40, 8, "", True),
    (11, "multi_tensor", "COMP_NODE", [10], 260, 7, "", False),
]
TYPES = {"COMP_NODE": 4, "COMM_COLL_NODE": 7}


def as_json(nodes=STEP):
    """As chakra_jsonizer writes it: objects one after the other, 64-bit numbers as text."""
    texts = [json.dumps({"version": "0.0.4"}, indent=2)]
    for number, name, kind, after, start, duration, shapes, host in nodes:
        value = {
            "id": str(number), "name": name, "type": kind, "ctrlDeps": [str(n) for n in after], "startTimeMicros": str(start),
            "durationMicros": str(duration), "inputs": {"values": "[]", "shapes": shapes},
            "attr": [{"name": "rf_id", "int64Val": "7"}, {"name": "is_cpu_op", "boolVal": host}],
        }  # fmt: skip
        texts.append(json.dumps(value, indent=2))
    return "".join(texts).encode()


def varint(value):
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def as_protobuf(nodes=STEP):
    messages = [field(1, "0.0.4")]
    for number, name, kind, after, start, duration, shapes, host in nodes:
        attributes = [field(1, "rf_id") + field(9, 7), field(1, "is_cpu_op") + field(27, int(host))]
        messages.append(
            field(1, number) + field(2, name) + field(3, TYPES[kind]) + field(4, b"".join(map(varint, after))) + field(6, start)
            + field(7, duration) + field(8, field(1, "[]") + field(2, shapes)) + b"".join(field(10, a) for a in attributes)
        )  # fmt: skip
    return b"".join(varint(len(message)) + message for message in messages)


FORMS = {"json": as_json(), "protobuf": as_protobuf(), "gzip": gzip.compress(as_protobuf(), mtime=0)}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_say_what_the_profiler_says(form):
    kernels = [(2, 11, 100), (4, 21, 60), (8, 28, 40), (11, 41, 7)]
    events = [event(name, "cpu_op", ts, dur) for _, name, _, _, ts, dur, _, host in STEP if host and name != GRADIENT]
    events += [event(GRADIENT, "cpu_op", ts, 1, **{"Input Dims": [dims]}) for ts, dims in ((26, [3, 4]), (30, [5]))]
    for number, launched, took in kernels:
        events.append(event("cudaLaunchKernel", "cuda_runtime", launched, 1, correlation=number))
        events.append(event("k", "kernel", 300, took, correlation=number))
    assert is_chakra(FORMS[form])
    assert from_chakra(FORMS[form], 4) == from_trace(json.dumps({"schemaVersion": 1, "traceEvents": events}), 4)


def test_collectives_take_no_time_of_the_step():
    model, compute = from_chakra(as_json(), 4)
    assert [(t.elements, t.work) for t in model.tensors] == [(5, 0.4), (12, 0.6)]
    assert compute.seconds(4) == pytest.approx(200e-6)  # without the 900 us of the all-reduce
    assert compute.optimizer == pytest.approx(7e-6)


def test_a_plan_for_a_trace_of_chakra(tmp_path, capsys):
    file = tmp_path / "rank0.et"
    file.write_bytes(as_protobuf())
    ask = ["plan", "--cluster", "dgx-1", "--model", str(file), "--batch", "256", "--algorithm", "ring"]
    assert main([*ask, "--trace-batch", "4"]) == 0
    assert "a trace of one step of 4 samples" in " ".join(capsys.readouterr().out.split())
    assert main(ask) == 2
    assert "--trace-batch is missing" in capsys.readouterr().err


def test_a_compressed_trace_of_the_profiler_is_read_as_such():
    events = [event(name, "cpu_op", ts, dur) for _, name, _, _, ts, dur, _, host in STEP if host and name != GRADIENT]
    events += [event(GRADIENT, "cpu_op", 30, 1, **{"Input Dims": [[5]]})]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    data = gzip.compress(text.encode())
    assert is_chakra(data)  # whoever reads the file passes it to from_chakra, which looks inside
    assert from_chakra(data, 4) == from_trace(text, 4)


def cut_between_messages():
    """The beginning of a compressed file whose contents end exactly after a message: without its end it looks complete."""
    packer = zlib.compressobj(wbits=31)
    return packer.compress(as_protobuf()) + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (as_protobuf(STEP[:4]), "it has no gradients with their shapes"),
        (as_protobuf([node for node in STEP if node[1] != BACK]), "not a trace of one training step"),
        (as_protobuf()[:-3], "it ends inside a message"),
        (b"\x02\x0a\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number does not end"),
        (b"\x02\x0a\x00\x02\x0b\x00", "a field of kind 3"),
        (gzip.compress(as_protobuf(), mtime=0)[:20] + b"\0" * 8, "not a trace|is cut off"),
        (cut_between_messages(), "the compressed trace is cut off"),
        (gzip.compress(as_protobuf()) + b"more", "has more after its end"),
        (gzip.compress(b'{"name": "mine"}'), "holds neither a trace of torch.profiler nor one of Chakra"),
        (as_json().replace(b'"durationMicros": "100"', b'"durationMicros": "long"'), "'long' where a whole number was expected"),
        (as_json() + b"[]", "where a node was expected"),
        (as_json() + b"{", "not a trace"),
    ],
    ids=["no gradients", "no backward", "cut", "endless number", "unknown kind", "gzip", "cut gzip", "long gzip",
         "another gzip", "not a number", "no node", "bad json"],
)  # fmt: skip
def test_nonsense_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_chakra(data, 4)


def test_other_files_are_not_taken_for_chakra():
    assert not is_chakra(b'{"name": "mine"}')
    assert not is_chakra(b'{"traceEvents": [{"name": "durationMicros"}]}')
    assert not is_chakra(b"")
    assert not is_chakra(b'[\n {"name": "mine", "layers": [1, 2, 3, 4, 5, 6, 7, 8]}]')
    assert not is_chakra(b"[\n")
    assert not is_chakra(b"x\nyz")


def test_a_long_description_of_the_trace_is_no_obstacle():
    head = field(1, "1.1.1-chakra.0.0.4") + b"".join(field(2, field(1, "schema") + field(13, "x" * 40)) for _ in range(4))
    assert is_chakra(varint(len(head)) + head)
