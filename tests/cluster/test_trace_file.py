"""Traces of torch.profiler as workloads: real ones of a CPU, and one as a GPU would write it."""

import json
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.cli.main import main
from phalanx.cluster import make_groups
from phalanx.cluster.trace_file import from_trace, is_trace

LAYERS = (64, 128, 32, 10)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        step()
        step()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    run.export_chrome_trace(str(path))
    return path


def test_a_trace_has_the_gradients_in_forward_order(traced):
    model, compute = from_trace(traced.read_text(), 32)
    sizes = [n for a, b in pairwise(LAYERS) for n in (a * b, b)]
    assert sorted(tensor.elements for tensor in model.tensors) == sorted(sizes)  # of one step, though the trace has two
    assert {tensor.elements for tensor in model.tensors[:2]} == {64 * 128, 128}
    assert sum(tensor.work for tensor in model.tensors) == pytest.approx(1)
    assert 0 < compute.forward < 1
    assert compute.per_sample > 0
    assert compute.optimizer > 0
    ready = [group.ready for group in make_groups(model, 4096)]
    assert ready == sorted(ready)


def test_a_plan_for_a_trace(traced, capsys):
    ask = ["plan", "--cluster", "dgx-1", "--model", str(traced), "--batch", "256", "--algorithm", "ring"]
    assert main([*ask, "--trace-batch", "32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "traced on dgx-1" in shown
    assert "a trace of one step of 32 samples" in shown
    assert main(ask) == 2
    assert "--trace-batch is missing" in capsys.readouterr().err


def event(name, cat, ts, dur, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def test_on_a_gpu_kernels_count_and_not_when_the_host_launched_them():
    names = "autograd::engine::evaluate_function: x", "torch::autograd::AccumulateGrad"
    events = [
        event("aten::linear", "cpu_op", 10, 5),
        event("cudaLaunchKernel", "cuda_runtime", 11, 1, correlation=1),
        event("forward", "kernel", 50, 100, correlation=1),
        event(names[0], "cpu_op", 20, 5),
        event("cudaLaunchKernel", "cuda_runtime", 21, 1, correlation=2),
        event("back", "kernel", 150, 60, correlation=2),
        event(names[1], "cpu_op", 26, 1, **{"Input Dims": [[3, 4]]}),
        event("cudaLaunchKernel", "cuda_runtime", 28, 1, correlation=3),
        event("back", "kernel", 210, 40, correlation=3),
        event(names[1], "cpu_op", 30, 1, **{"Input Dims": [[5]]}),
    ]
    model, compute = from_trace(json.dumps({"schemaVersion": 1, "traceEvents": events}), 4)
    assert [(t.elements, t.work) for t in model.tensors] == [(5, 0.4), (12, 0.6)]
    assert compute.forward == pytest.approx(0.5)
    assert compute.seconds(4) == pytest.approx(200e-6)


@pytest.mark.parametrize(
    "content", [{}, {"traceEvents": []}, {"traceEvents": [1]}, {"traceEvents": [event("x", "cpu_op", 1, 1)]}, []]
)
def test_other_files_are_refused(content):
    with pytest.raises(ValueError, match="not a trace of one training step"):
        from_trace(json.dumps(content), 4)
    assert not is_trace('{"name": "mine"}')
