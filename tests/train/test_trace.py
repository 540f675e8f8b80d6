"""The trace of a few steps: what Chrome and Perfetto want, from spans and clocks of several ranks."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.grad.reducer import TransferTime
from phalanx.train.config import RunConfig
from phalanx.train.trace import Span, Tracer, place_on_lanes, to_chrome
from phalanx.train.trainer import train

PHASES = ("input", "forward", "backward", "wait", "update")


def check_trace(trace, ranks):
    """Raise AssertionError where it is no trace of so many ranks; the spans by rank and thread."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    spans: dict[tuple[int, int], list] = {}
    named = set()
    for event in trace["traceEvents"]:
        assert event["name"]
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        spans.setdefault((event["pid"], event["tid"]), []).append(event)
    assert {pid for pid, _ in spans} == set(range(ranks))
    assert named >= {(pid, 0, "process_name") for pid in range(ranks)}
    for (pid, tid), own in spans.items():
        assert (pid, tid, "thread_name") in named
        assert [e["ts"] for e in own] == sorted(e["ts"] for e in own)
        around: list[float] = []  # ends of the spans around the present one
        for event in own:
            while around and around[-1] <= event["ts"] + 1e-3:
                around.pop()
            assert not around or event["ts"] + event["dur"] <= around[-1] + 2e-3, f"{event['name']} ends after what it began in"
            around.append(event["ts"] + event["dur"])
    return spans


def test_a_run_writes_a_trace_of_its_second_epoch(tmp_path, comm):
    config = RunConfig(name="digits", epochs=2, batch=360, trace_steps=2, log_every=2)
    result = train(config, comm, out=tmp_path, show=False)
    assert result.steps == 6
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = check_trace(trace, 1)
    assert [e["name"] for e in spans[0, 0]] == ["step 5", *PHASES, "step 6", *PHASES]
    groups = [e for (_, tid), own in spans.items() for e in own if tid > 0]
    assert {e["args"]["step"] for e in groups} == {5, 6}
    for group in groups:
        around = next(e for e in spans[0, 0] if e["name"] == f"step {group['args']['step']}")
        assert around["ts"] <= group["ts"]
        assert group["ts"] + group["dur"] <= around["ts"] + around["dur"]
        assert group["args"]["bytes"] > 0
    page = (tmp_path / "report.html").read_text()
    assert 'aria-label="timeline"' in page
    assert "complete" in page


@pytest.mark.parametrize(
    ("epochs", "wanted", "traced"), [(1, 2, [1, 2]), (3, 9, [4, 5, 6, 7]), (3, 4, [4, 5, 6, 7]), (2, 3, [5, 6, 7]), (3, 0, [])]
)
def test_which_steps(tmp_path, comm, epochs, wanted, traced):
    """Of epochs of 4 steps, or of 3 where there is one only; counted from 1."""
    tracer = Tracer(RunConfig(name="x", epochs=epochs, trace_steps=wanted), comm, tmp_path)
    steps = 4 if epochs > 1 else 3
    begin = 0 if epochs > 1 else 1
    for number in range(epochs * steps):
        tracer.begin_step(number // steps, number % steps, steps, number=number + begin, at=time.perf_counter())
        tracer.mark("forward")
        tracer.end_step([])
    if not traced:
        assert not (tmp_path / "trace.json").exists()
        return
    (spans,) = check_trace(json.loads((tmp_path / "trace.json").read_text()), 1).values()
    assert [e["args"]["step"] for e in spans if e["cat"] == "step"] == [step + begin if epochs == 1 else step for step in traced]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_ranks_are_in_one_file(tmp_path, ranks):
    def play(comm):
        tracer = Tracer(RunConfig(name="x", epochs=1, trace_steps=2), comm, tmp_path)
        begun = time.perf_counter() - 1.0
        for index in range(2):
            now = begun + 0.1 * index
            tracer.begin_step(0, index, 2, number=index + 1, at=now)
            for place, phase in enumerate(PHASES, start=1):
                tracer.mark(phase, now + 0.002 * place)
            ways = [TransferTime(now + 0.001 * i, now + 0.004 + 0.001 * comm.rank, 8) for i in range(3)]
            tracer.end_step(reversed(ways))

    phalanx.run_local(ranks, play)
    spans = check_trace(json.loads((tmp_path / "trace.json").read_text()), ranks)
    for rank in range(ranks):
        assert [e["name"] for e in spans[rank, 0] if e["cat"] == "phase"] == 2 * list(PHASES)
        first = [own[0] for (pid, tid), own in sorted(spans.items()) if pid == rank and tid > 0]
        assert [e["name"] for e in first] == ["group 0", "group 1", "group 2"]
        assert [e["dur"] for e in first] == pytest.approx([4000 + 1000 * rank - 1000 * i for i in range(3)], abs=1)


moments = st.tuples(st.integers(0, 40), st.integers(0, 20))


@given(st.lists(moments, max_size=30, unique=True))
def test_spans_of_one_lane_do_not_overlap_and_no_lane_is_wasted(times):
    spans = [Span("all-reduce", f"group {i}", float(begun), float(begun + length), 1) for i, (begun, length) in enumerate(times)]
    lanes = place_on_lanes(spans)
    for a in spans:
        for b in spans:
            assert a is b or lanes[a] != lanes[b] or a.ended <= b.begun or b.ended <= a.begun
    check_trace(to_chrome([spans]), 1 if spans else 0)
    under_way = max((sum(s.begun <= t < s.ended for s in spans) for t in range(61)), default=0)
    points = sum(s.begun == s.ended for s in spans)
    assert max(lanes.values(), default=-1) < max(under_way, 1) + points


def test_the_checker_notices_spans_that_cross():
    crossing = [Span("phase", "a", 0.0, 2.0, 1), Span("phase", "b", 1.0, 3.0, 1)]
    with pytest.raises(AssertionError, match="b ends after"):
        check_trace(to_chrome([crossing]), 1)
