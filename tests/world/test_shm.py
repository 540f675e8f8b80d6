"""Collectives of ranks that share a host, against naive oracles: every rank knows what every rank put in."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.long import only_long, times

from phalanx.native import core, errors, meeting
from phalanx.native.errors import Aborted, Disagreement, RankDied, RankLate
from phalanx.native.team import HostTeam
from phalanx.native.updates import SgdRow, table_of, update_sgd

pytestmark = pytest.mark.skipif(bool(core.UNAVAILABLE), reason=core.UNAVAILABLE or "available")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# nothing, one, odd, around a register, around what the last to come does alone, around a chunk, several pieces of the stage
COUNTS = (0, 1, 3, 31, 65, 4095, 16383, 16385, 40_001, 262_147)
KERNELS = ("portable", "avx2", "avx512")

_names = itertools.count()


def store_of(comm) -> dist.Store:
    """Where the ranks meet; a world of one initialises no process group."""
    return dist.PrefixStore("test_shm", dist.distributed_c10d._get_default_store()) if comm.size > 1 else dist.HashStore()


def join(comm, timeout=10.0) -> HostTeam:
    """A fresh team of all ranks; all ranks have made the same number of teams before."""
    store = store_of(comm)
    team = HostTeam.join(store, comm.rank, comm.size, timeout=timeout, name=f"{comm.size}/{next(_names)}")
    assert team is not None
    return team


def places(team: HostTeam, flat: torch.Tensor, values: torch.Tensor):
    """The values in an arena, at an offset that is no multiple of a cache line, and in memory of the rank's own."""
    size = values.element_size()
    for offset in (0, 7 * size):
        x = flat[offset:][: values.nbytes].view(values.dtype)
        x.copy_(values)
        assert team.owns(x) or not values.numel()
        yield x
    x = values.clone()
    assert not team.owns(x) or not values.numel()
    yield x


def integers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that every sum of them is exact in every dtype (bool: their lowest bit)."""
    values = (torch.arange(count) * 5 + rank * 3) % 11 - 5 * (dtype is not torch.uint8 and dtype is not torch.bool)
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype)


def noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def rank_order_sum(values: list[torch.Tensor], scale: float) -> torch.Tensor:
    """The stupid oracle: half floats in float32, one after the other, rounded once."""
    wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else values[0].dtype
    total = values[0].to(wide)
    for x in values[1:]:
        total = total + x.to(wide)
    return (total * torch.tensor(scale, dtype=wide)).to(values[0].dtype)


# ---- results -----------------------------------------------------------------------------------------------------------------


def all_reduce_is_exact(comm) -> None:
    team = join(comm)
    flat = team.allocate(max(COUNTS) * 8 + 64)
    for dtype, op, count in itertools.product((*FLOATS, *INTS, torch.bool), ("sum", "max", "min"), COUNTS):
        if op != "sum" and count > 100 and count != 16_385:
            continue  # the way is the same for all ops, the arithmetic is not
        values = [integers(rank, count, dtype) for rank in range(comm.size)]
        stack = torch.stack(values)
        if dtype is torch.bool:
            wanted = stack.all(0) if op == "min" else stack.any(0)
        else:
            oracle = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[op]
            wanted = oracle(stack.double() if dtype.is_floating_point else stack, 0).to(dtype)
        for x in places(team, flat, values[comm.rank]):
            team.all_reduce(x, op)
            assert torch.equal(x, wanted), (dtype, op, count, team.owns(x))
    team.close()


def test_all_reduce_is_exact_for_all_dtypes_ops_and_sizes(world):
    world.run(all_reduce_is_exact, deadline=60)


def sums_are_in_rank_order(comm, kernels: str) -> list[bytes]:
    team = join(comm)
    if not core._native.choose_kernels(kernels):
        return []
    try:
        flat = team.allocate(300_000 * 8)
        digest = []
        for dtype, count, scale in itertools.product(FLOATS, (1, 77, 5000, 70_001), (1.0, 1 / comm.size, 0.3)):
            values = [noise(rank, count, dtype) for rank in range(comm.size)]
            wanted = rank_order_sum(values, scale)
            for x in places(team, flat, values[comm.rank]):
                team.all_reduce(x, scale=scale)
                assert torch.equal(x, wanted), (dtype, count, scale, team.owns(x))
            digest.append(x[:5].view(torch.uint8).numpy().tobytes())
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 65504.0, 6e-8, 1e-40])
        for dtype, op in itertools.product(FLOATS, ("sum", "max", "min")):
            x = special.to(dtype).roll(comm.rank)
            wanted = special.to(dtype).roll(0)
            for rank in range(1, comm.size):
                other = special.to(dtype).roll(rank)
                wide = torch.float32 if dtype.itemsize == 2 else dtype
                wanted = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](wanted.to(wide), other.to(wide))
            team.all_reduce(x, op)
            torch.testing.assert_close(x, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)
        return digest
    finally:
        core._native.choose_kernels("avx512") or core._native.choose_kernels("avx2")
        team.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_float_sums_have_the_bits_of_the_sum_in_rank_order(world, kernels):
    digests = world.run(sums_are_in_rank_order, kernels)
    if not digests[0]:
        pytest.skip(f"this processor has no {kernels}")
    assert all(digest == digests[0] for digest in digests)


def halves_round_as_torch_rounds(comm, kernels: str) -> None:
    """Every float16 and bfloat16 there is, through the kernels and back."""
    team = join(comm)
    if core._native.choose_kernels(kernels):
        every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
        for dtype in (torch.float16, torch.bfloat16):
            for scale in (1.0, 0.3, 1e-3, 300.0):
                x = every.view(dtype).clone()
                if comm.rank:
                    x.zero_()
                team.all_reduce(x, scale=scale)
                wanted = ((every.view(dtype).float() + 0.0) * torch.tensor(scale)).to(dtype)
                torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)
        core._native.choose_kernels("avx512") or core._native.choose_kernels("avx2")
    team.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_floats_round_as_torch_rounds(pair, kernels):
    pair.run(halves_round_as_torch_rounds, kernels)


def the_other_collectives(comm) -> None:
    team, me, n = join(comm), comm.rank, comm.size
    flat = team.allocate(max(COUNTS) * 8 + 64)
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.uint8), COUNTS):
        values = [integers(rank, count, dtype) for rank in range(n)]
        cut = [rank * count // n for rank in range(n + 1)]
        mine = slice(cut[me], cut[me + 1])
        for x in places(team, flat, values[me]):
            part = team.reduce_scatter(x)
            wanted = values[me].clone()
            wanted[mine] = torch.stack(values).double().sum(0).to(dtype)[mine]
            assert torch.equal(x, wanted)
            assert part.numel() == cut[me + 1] - cut[me]
            assert torch.equal(part, wanted[mine])
        for x in places(team, flat, values[me]):
            team.all_gather(x)
            assert torch.equal(x, torch.cat([values[rank][cut[rank] : cut[rank + 1]] for rank in range(n)]))
        for root in range(n):
            for x in places(team, flat, values[me]):
                team.broadcast(x, root)
                assert torch.equal(x, values[root])
        team.barrier()
    team.close()


def test_reduce_scatter_all_gather_and_broadcast(world):
    world.run(the_other_collectives, deadline=60)


def larger_than_the_stage(comm) -> None:
    team = join(comm)
    count = 3_000_001
    x = integers(comm.rank, count, torch.float32)
    wanted = torch.stack([integers(rank, count, torch.float32) for rank in range(comm.size)]).sum(0)
    team.all_reduce(x)
    assert torch.equal(x, wanted)
    x = integers(comm.rank, count, torch.float32)
    part = team.reduce_scatter(x)
    assert torch.equal(part, team.part(wanted, comm.rank))
    for rank in range(comm.size):
        if rank != comm.rank:  # left as they were
            assert torch.equal(team.part(x, rank), team.part(integers(comm.rank, count, torch.float32), rank))
    x = integers(comm.rank, count, torch.float32)
    team.broadcast(x, comm.size - 1)
    assert torch.equal(x, integers(comm.size - 1, count, torch.float32))
    team.close()


def test_tensors_of_any_size_pass_through_the_stage(world):
    world.run(larger_than_the_stage)


def random_operations(comm, operations: int) -> None:
    team = join(comm, timeout=30)
    flat = team.allocate(1 << 20)
    random = torch.Generator().manual_seed(7)  # the same calls on all ranks

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    dtypes = (*FLOATS, *INTS)
    for number in range(operations):
        dtype = dtypes[draw(len(dtypes))]
        count = draw(20_000 if draw(20) == 0 else 300)
        x = flat[draw(100) * 8 :][: count * dtype.itemsize].view(dtype) if draw(2) else torch.empty(count, dtype=dtype)
        verb, root = draw(4), draw(comm.size)
        x.fill_((comm.rank + number) % 7)
        if verb == 0:
            team.all_reduce(x)
            wanted = sum((rank + number) % 7 for rank in range(comm.size))
        elif verb == 1:
            team.broadcast(x, root)
            wanted = (root + number) % 7
        elif verb == 2:
            team.all_reduce(x, "max")
            wanted = max((rank + number) % 7 for rank in range(comm.size))
        else:
            x = team.reduce_scatter(x)
            wanted = sum((rank + number) % 7 for rank in range(comm.size))
        assert bool((x == wanted).all()), number
    team.close()


@only_long
def test_thousands_of_random_operations_of_eight_ranks(pools):
    pools.of(8).run(random_operations, times(10_000, seldom=1_500), deadline=170)


# ---- the fused update --------------------------------------------------------------------------------------------------------

SHAPES = ((64, 3, 7, 7), (64,), (1,), (300, 211), (5,), (70_003,))


def fused_update_of(comm, lars: bool, nesterov: bool, kernels: str) -> None:
    """Five steps of one shared replica against one process with the mean gradient."""
    team = join(comm)
    if not core._native.choose_kernels(kernels):
        return
    sizes = [math.prod(shape) for shape in SHAPES]
    offsets = [sum(-(-size // 16) * 16 for size in sizes[:k]) for k in range(len(sizes) + 1)]
    gradients = team.allocate(offsets[-1] * 4).view(torch.float32)
    parameters = team.allocate_one_for_all(offsets[-1] * 4).view(torch.float32)
    velocities = team.allocate_one_for_all(offsets[-1] * 4).view(torch.float32)
    table = [
        SgdRow(offset, size, 0.1, 0.9, 0.01, nesterov, lr_in_momentum=lars, adapted=lars, trust=0.02, eps=1e-9)
        if size > 100  # as LARS skips biases
        else SgdRow(offset, size, 0.1, 0.9, 0.0, nesterov, lr_in_momentum=lars)
        for offset, size in zip(offsets, sizes)
    ]
    rules = table_of(table)
    squares = team.allocate_one_for_all(8 * sum(rule.squares for rule in table)).view(torch.float64)

    def view(flat: torch.Tensor, k: int) -> torch.Tensor:
        return flat[offsets[k] :][: sizes[k]]

    if comm.rank == 0:
        for k in range(len(sizes)):
            view(parameters, k).copy_(noise(50 + k, sizes[k], torch.float32))
    team.barrier()
    oracle = [view(parameters, k).double().clone().requires_grad_() for k in range(len(sizes))]
    velocity = [torch.zeros_like(w) for w in oracle]
    groups = [{"params": [w], "weight_decay": rule.weight_decay} for w, rule in zip(oracle, table)]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=nesterov)
    team.barrier()
    for number in range(5):
        if number == 2:  # somebody writes to the parameters: norms that were carried are not those of now
            if comm.rank == 0:
                parameters.mul_(2)
            with torch.no_grad():
                torch._foreach_mul_(oracle, 2)
            team.barrier()
        if number == 3:  # a schedule
            rules[:, 2] *= 0.5
            for group in sgd.param_groups:
                group["lr"] *= 0.5
        for k, (w, rule) in enumerate(zip(oracle, table)):
            all_ranks = [noise(100 * number + 10 * rank + k, sizes[k], torch.float32) for rank in range(comm.size)]
            view(gradients, k).copy_(all_ranks[comm.rank])
            w.grad = torch.stack(all_ranks).double().mean(0)
            if lars:
                with torch.no_grad():
                    lr = float(rules[k, 2])
                    ratio = (
                        rule.trust * w.norm() / (w.grad.norm() + rule.weight_decay * w.norm() + rule.eps) if rule.adapted else 1.0
                    )
                    u = lr * ratio * (w.grad + rule.weight_decay * w)
                    velocity[k].mul_(rule.momentum).add_(u)
                    w -= rule.momentum * velocity[k] + u if nesterov else velocity[k]
        if not lars:
            sgd.step()
        before = gradients.clone()
        update_sgd(team, gradients, parameters, velocities, rules, scale=1 / comm.size, squares=squares, carry=number > 0)
        assert torch.equal(gradients, before), "gradients are only read"
        for k, w in enumerate(oracle):
            torch.testing.assert_close(view(parameters, k).double(), w.detach(), rtol=1e-5, atol=2e-6)
        team.barrier()
    with pytest.raises(errors.Refused, match="one for all"):
        update_sgd(team, gradients, gradients.clone(), velocities, rules, scale=1.0, squares=squares)
    core._native.choose_kernels("avx512") or core._native.choose_kernels("avx2")
    team.close()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("lars", [False, True], ids=["sgd", "lars"])
def test_fused_update_equals_one_process_with_the_mean_gradient(world, lars, nesterov):
    world.run(fused_update_of, lars, nesterov, "avx512" if lars else "portable")


def update_disagrees(comm) -> None:
    team = join(comm)
    gradients = team.allocate(4000).view(torch.float32)
    parameters, velocities = (team.allocate_one_for_all(4000).view(torch.float32) for _ in range(2))
    rules = table_of([SgdRow(0, 1000, lr=0.1 if comm.rank else 0.2)])
    with pytest.raises(Disagreement):
        update_sgd(team, gradients, parameters, velocities, rules, scale=1.0)
    assert not parameters.any()
    team.close()


def test_ranks_that_update_by_different_rules_learn_it(pair):
    pair.run(update_disagrees)


# ---- memory ------------------------------------------------------------------------------------------------------------------


def arenas_come_and_go(comm) -> None:
    gc.collect()  # what an earlier test of this process left
    before, mapped = _descriptors(), _mappings()
    team = join(comm)
    assert _segments(_descriptors()) == _segments(before), "the segment can still be opened"
    assert _mappings() > mapped
    first, second, empty = team.allocate(100), team.allocate(5000), team.allocate(0)
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0
    assert empty.numel() == 0
    assert not first.any()
    assert not second.any()
    common = team.allocate_one_for_all(1000)
    assert not team.owns(common) or comm.size == 1
    common[comm.rank] = comm.rank + 1
    team.barrier()
    assert common[: comm.size].tolist() == list(range(1, comm.size + 1))
    first.fill_(1)
    team.all_reduce(first)
    team.release(second)
    assert not team.owns(second)
    second.fill_(7)  # still memory
    team.close()
    assert bool((first == comm.size).all()), "a tensor outlives its team"
    with pytest.raises(RuntimeError, match="left"):
        team.barrier()
    del first, second, empty, common, team
    assert _descriptors() == before
    assert _mappings() == mapped


def _segments(links: list[str]) -> list[str]:
    return [link for link in links if "phalanx" in link]


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:phalanx")


def _descriptors() -> list[str]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(path) for path in paths if os.path.islink(path))  # not that of the listing itself


def test_memory_comes_and_goes_without_a_trace(world):
    world.run(arenas_come_and_go)


def named_segments(comm) -> None:
    meeting.METHODS = (1,)
    try:
        team = join(comm)
        x = team.allocate(4096)
        x.fill_(1)
        team.all_reduce(x)
        assert bool((x == comm.size).all())
        ours = tuple(f"phalanx-{pid}-" for pid in comm.allgather_obj(os.getpid()))
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]
        team.close()
    finally:
        meeting.METHODS = (0, 1)


def test_names_in_dev_shm_are_gone_when_all_have_mapped_them(world):
    world.run(named_segments)


def unavailable_on_one(comm, reason: str) -> str:
    original, enter = core.UNAVAILABLE, meeting._enter
    try:
        if comm.rank == comm.size - 1 and reason == "native":
            core.UNAVAILABLE = "no native core (test)"
        if comm.rank == comm.size - 1 and reason == "map":
            meeting._enter = lambda *_: (None, "Permission denied (test)")
        store = store_of(comm)
        assert HostTeam.join(store, comm.rank, comm.size, timeout=10, name=f"none/{next(_names)}") is None
        return meeting._meet(store, comm.rank, comm.size, 10.0, f"none/{next(_names)}").reason
    finally:
        core.UNAVAILABLE, meeting._enter = original, enter


@pytest.mark.parametrize(("reason", "words"), [("native", "no native core"), ("map", "Permission denied")])
def test_one_rank_without_it_and_none_has_it(world, reason, words):
    told = world.run(unavailable_on_one, reason)
    assert all(text == told[0] for text in told)
    assert words in told[0]


# ---- failure -----------------------------------------------------------------------------------------------------------------


def disagreements(comm) -> None:
    team = join(comm)
    flat = team.allocate(400_000).view(torch.float32)
    odd = comm.rank == comm.size - 1
    own = torch.ones(1000)
    big = torch.ones(500_000)  # several pieces

    def differs(usual, other) -> None:
        with pytest.raises(Disagreement, match="ranks disagree: rank") as caught:
            (other if odd else usual)()
        if comm.size > 2:
            assert caught.value.late == (comm.size - 1,)
        flat[:10].fill_(1)
        team.all_reduce(flat[:10])  # as good as before
        own.fill_(1)
        team.all_reduce(own)
        assert bool((flat[:10] == comm.size).all())
        assert bool((own == comm.size).all())

    for _ in range(3):
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(flat[:11]))
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(flat[1:11]))
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(flat[:10], "max"))
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(flat[:10].view(torch.int32)))
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(flat[:10], "mean"))
        differs(lambda: team.all_reduce(flat[:10]), team.barrier)
        differs(lambda: team.all_reduce(flat[:10]), lambda: team.all_reduce(own[:10]))
        differs(lambda: team.all_reduce(big), lambda: team.all_reduce(big[:3]))
        differs(lambda: team.broadcast(big, 0), lambda: team.broadcast(big, 1))
        differs(lambda: team.broadcast(big, 0), lambda: team.all_reduce(flat[:100_000]))
        differs(lambda: team.allocate(10), lambda: team.allocate(11))
    assert bool((big == 1).all())
    team.close()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_disagree_all_learn_it_and_nothing_is_touched(pools, size):
    pools.of(size).run(disagreements)


def late_rank(comm, staged: bool) -> None:
    team = join(comm, timeout=0.5)
    flat = team.allocate(40_000).view(torch.float32)
    x = torch.ones(10_000) if staged else flat
    begun = time.monotonic()
    if comm.rank == 1:
        comm.barrier()  # the others have given up
    with pytest.raises(RankLate, match="rank 1 did not come") as caught:
        team.all_reduce(x)
    assert caught.value.late == (1,)
    assert caught.value.dead == ()
    if comm.rank != 1:
        assert 0.4 < time.monotonic() - begun < 10
        comm.barrier()
    with pytest.raises(RankLate):  # and the team is of no more use
        team.barrier()
    comm.barrier()
    team.close()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_does_not_come_is_named_by_all(pools, size, staged):
    pools.of(size).run(late_rank, staged)


def abort_from_another_thread(comm) -> None:
    team = join(comm, timeout=20)
    if comm.rank == 0:
        timer = threading.Timer(0.2, team.abort)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(Aborted, match="abort"):
            team.barrier()
        assert time.monotonic() - begun < 10  # far from the timeout, on a busy machine, too
        timer.join()
        comm.barrier()
    elif comm.rank == comm.size - 1:
        comm.barrier()  # comes when all is over
        with pytest.raises(Aborted, match="on rank 0") as caught:
            team.barrier()
        assert caught.value.late == (0,)
    else:
        with pytest.raises(Aborted, match="on rank 0"):
            team.barrier()
        comm.barrier()
    comm.barrier()
    team.close()


@pytest.mark.parametrize("size", [2, 3])
def test_abort_ends_the_wait_on_all_ranks(pools, size):
    pools.of(size).run(abort_from_another_thread)


def leaver(comm) -> None:
    team = join(comm, timeout=20)
    team.barrier()
    if comm.rank == 0:
        team.close()
        team.close()
    else:
        with pytest.raises(RankDied, match="rank 0 ended or left") as caught:
            team.barrier()
        assert caught.value.dead == (0,)
    comm.barrier()
    team.close()


def test_who_closed_the_team_is_named(pools):
    pools.of(3).run(leaver)


def two_threads(comm) -> None:
    team = join(comm, timeout=20)
    if comm.rank == 0:
        waiting = threading.Thread(target=team.barrier)
        waiting.start()
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="another thread"):
            team.barrier()
        comm.barrier()
        waiting.join()
    else:
        comm.barrier()
        team.barrier()
    team.close()


def test_a_second_thread_is_refused(pair):
    pair.run(two_threads)


def wrong_arguments(comm) -> None:
    team = join(comm)
    with pytest.raises(ValueError, match="contiguous"):
        team.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="contiguous"):
        team.broadcast(torch.zeros(4, 4).t(), 0)
    with pytest.raises(ValueError, match="scale"):
        team.all_reduce(torch.zeros(4, dtype=torch.int32), scale=0.5)
    with pytest.raises(ValueError, match="must be in"):
        team.broadcast(torch.zeros(4), comm.size)
    with pytest.raises(KeyError):
        team.all_reduce(torch.zeros(4), "product")  # type: ignore[arg-type]
    team.barrier()
    team.close()


def test_wrong_arguments_raise_before_anything_happens(world):
    world.run(wrong_arguments)
