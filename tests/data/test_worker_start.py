"""How worker processes start: from any script, seeded as torch seeds them, with nothing of the trainer's that could hurt."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
from tests.data.stand_ins import Info, Numbers, World, noise
from torch.utils.data import DataLoader, default_collate, get_worker_info

from phalanx.data import Loader, SampleError, recycled

pytestmark = pytest.mark.usefixtures("warm_python")
DEADLINE = 60.0

UNGUARDED = """
import torch
from phalanx.data import Loader

class Squares(torch.utils.data.Dataset):     # in the script itself, as in notebooks and tutorials
    def __len__(self): return 20
    def __getitem__(self, i): return torch.tensor([i * i]), i

torch.rand(300, 300) @ torch.rand(300, 300)  # torch has run, with its threads
scale = 3
total = lambda samples: scale * sum(int(x) for x, _ in samples)
with Loader(Squares(), batch=5, workers=2, kind="process", shuffle=False, collate_fn=total) as loader:
    print(list(loader))
"""


def run(program, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=DEADLINE, **options
    )


def test_a_script_without_a_guard_works(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[90, 765, 2190, 4365]\n", "")


def test_the_start_method_of_a_program_counts_if_it_is_spawn():
    from phalanx.data.loader_options import checked_context

    program = """
    import multiprocessing, sys
    from phalanx.data.loader_options import checked_context
    chosen = [checked_context(None, "process", None).get_start_method()]
    for method in ("fork", "forkserver", "spawn"):
        multiprocessing.set_start_method(method, force=True)
        chosen.append(checked_context(None, "process", None).get_start_method())
    print(*chosen)
    """
    assert run(program).stdout == "fork fork fork spawn\n"
    for method in ("fork", "forkserver", "spawn"):
        assert checked_context(method, "process", None).get_start_method() == method
    context = multiprocessing.get_context("spawn")
    assert checked_context(context, "process", None) is context


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_do_not_depend_on_the_start_method(method):
    options = {"batch": 6, "transform": noise}
    expected = list(Loader(Numbers(24), **options))
    with Loader(Numbers(24), workers=2, kind="process", multiprocessing_context=method, **options) as loader:
        for (x, y), (same_x, same_y) in zip(loader, expected, strict=True):
            assert torch.equal(x, same_x)
            assert torch.equal(y, same_y)


# ---- who am I


def test_a_data_set_learns_its_worker_as_with_a_dataloader():
    assert get_worker_info() is None
    seeds = {}
    for rank in range(2):
        with Loader(Info(40), World(rank, 2), batch=4, workers=3, kind="process", seed=7) as loader:
            for batch in loader:
                assert set(batch["workers"].tolist()) == {3}
                assert set(batch["n"].tolist()) == {40}
                seeds |= {(rank, i): seed for i, seed in zip(batch["id"].tolist(), batch["seed"].tolist())}
    assert get_worker_info() is None
    for rank in range(2):
        base = {seed - worker for (where, worker), seed in seeds.items() if where == rank}
        assert len(base) == 1  # base seed + number of the worker
    assert len(set(seeds.values())) == len(seeds)  # and other ones on other ranks


class Told:
    """Notes what a worker is like when worker_init_fn runs, and gives it to the data set, as people do."""

    def __call__(self, worker):
        info = get_worker_info()
        assert info.id == worker
        info.dataset.notes = [
            worker,
            torch.initial_seed() == info.seed,
            random.random() == random.Random(info.seed).random(),
            random.random(),
            torch.rand(()).item(),
            float(numpy.random.rand()),
        ]


class Notes(Numbers):
    """Samples are what worker_init_fn noted."""

    notes = None

    def __init__(self):
        pass

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.tensor(self.notes, dtype=torch.float64)


def notes(make):
    found = {}
    for batch in make():
        for row in batch.tolist():
            found[int(row[0])] = row[1:]
    return found


def test_worker_init_fn_runs_once_in_each_worker_with_seeded_generators():
    def ours(**options):
        with Loader(Notes(), batch=2, workers=2, kind="process", worker_init_fn=Told(), **options) as loader:
            return notes(lambda: (batch for _ in range(2) for batch in loader))

    first = ours()
    theirs = notes(lambda: DataLoader(Notes(), 2, num_workers=2, worker_init_fn=Told()))
    for found in (first, theirs):  # torch's own workers pass the same test
        assert all(row[:2] == [1.0, 1.0] for row in found.values())
    assert 1 <= len(first) <= 2
    again = ours()
    assert all(again[worker] == first[worker] for worker in set(again) & set(first))  # the same in every run
    assert all(row[2:] != first[worker][2:] for worker, row in ours(seed=1).items() if worker in first)


def test_what_worker_init_fn_raises_arrives_with_its_traceback():
    def fails(worker):
        raise FileNotFoundError("no index here")

    with Loader(Numbers(8), batch=2, workers=1, kind="process", worker_init_fn=fails) as loader:
        for _ in range(2):
            with pytest.raises(SampleError, match=r"worker_init_fn\(0\) failed: FileNotFoundError: no index here") as caught:
                next(iter(loader))
        assert "in fails" in str(caught.value.__cause__)
        assert "worker process 0" in str(caught.value.__cause__)


# ---- what a fork must not have


class Handlers(Numbers):
    """The handlers of a worker, as numbers: 0 the default, 1 ignored."""

    def __getitem__(self, i):
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return torch.tensor([*(int(signal.getsignal(number)) for number in numbers), len(blocked), torch.get_num_threads()])


def test_a_worker_has_none_of_the_trainers_handlers():
    seen = []
    before = {number: signal.signal(number, lambda *_: seen.append(1)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with Loader(Handlers(4), batch=4, workers=1, kind="process") as loader:
            assert next(iter(loader))[0].tolist() == [0, 1, 1, 0, 0, 1]
            begun = time.monotonic()
        assert time.monotonic() - begun < 4  # it went when it was asked to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not seen


def test_a_lock_that_another_thread_holds_during_the_fork_is_free_in_the_worker():
    large = torch.zeros(2, 1 << 20)
    held, done = threading.Event(), threading.Event()

    def hold():
        with recycled._lock:
            held.set()
            done.wait(DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(DEADLINE)
    try:
        with Loader(
            list(large), batch=2, workers=1, kind="process", transform=lambda x, draws: recycled.empty(x.shape, x.dtype).copy_(x)
        ) as loader:
            batches = iter(loader)
            done_in_time = threading.Timer(DEADLINE, done.set)
            done_in_time.start()
            assert torch.equal(next(batches), large)
            assert not done.is_set()
            done_in_time.cancel()
    finally:
        done.set()
        thread.join()


def shares(samples):
    return [default_collate(samples).is_shared(), default_collate([x.numpy() for x in samples]).is_shared()]


def test_no_batch_lies_in_a_file_that_a_killed_worker_would_leave():
    """Neither if you give a collate_fn nor if you don't. torch's own workers put batches into files of /dev/shm for a moment."""
    samples = list(torch.zeros(2, 3))
    (theirs,) = DataLoader(samples, 2, num_workers=1, collate_fn=shares)
    assert theirs == [True, True]
    options = {"batch": 2, "workers": 1, "kind": "process"}
    with Loader(samples, **options, collate_fn=shares) as loader:
        assert next(iter(loader)) == [False, False]
    with Loader(samples, **options, transform=lambda x, draws: torch.tensor([x.is_shared()])) as loader:
        assert next(iter(loader)).tolist() == [False]


INTERRUPTED = """
import os
from multiprocessing import active_children
from tests.data.stand_ins import Numbers
from phalanx.data import Loader
loader = Loader(Numbers(10_000, slow=0.02), batch=20, workers=2, kind="process")
for i, batch in enumerate(loader):
    if i == 0:
        print(*[child.pid for child in active_children()], flush=True)
"""


def test_ctrl_c_ends_everything_with_one_traceback():
    program = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    ) as trainer:  # fmt: skip
        try:
            workers = trainer.stdout.readline().split()
            os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does
            _, errors = trainer.communicate(timeout=DEADLINE)
        finally:
            trainer.kill()
    assert len(workers) == 2
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1
    until = time.monotonic() + DEADLINE
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_closing_is_quick_though_siblings_hold_each_others_connections():
    loader = Loader(Numbers(40), batch=4, workers=4, kind="process")
    list(loader)
    begun = time.monotonic()
    loader.close()
    assert time.monotonic() - begun < 4  # not the 5 s after which an idle process is ended by force
    assert not [child for child in multiprocessing.active_children() if child.name == "phalanx loader"]
