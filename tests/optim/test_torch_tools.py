"""What torch brings for optimizers works on ours: schedulers, scalers, state dicts, hooks."""

import copy
import warnings

import pytest
import torch
from tests.optim.oracle import (
    SMALL,
    AllReduce,
    agree,
    alone,
    close,
    create_multi_node_optimizer,
    flat,
    loss_of,
    no_sync,
    plain_step,
    sgd,
    together,
)

import phalanx

EAGER = {"sync": AllReduce(overlap=True), "bucket_bytes": 200}


def local(make=sgd, model=SMALL, **options):
    """A model and its optimizer in a world of one."""
    own = copy.deepcopy(model)
    return own, create_multi_node_optimizer(make(own), phalanx.create_communicator(), **options)


def test_it_is_a_torch_optimizer():
    _, opt = local()
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is opt.optimizer.param_groups
    assert opt.state is opt.optimizer.state
    assert opt.defaults is opt.optimizer.defaults
    assert "SGD" in repr(opt)
    assert not hasattr(opt, "no_such_thing")


SCHEDULERS = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (t + 1)),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=8),  # edits momentum, too
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
    "SequentialLR": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.ConstantLR(opt, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("inner", [False, True], ids=["on ours", "on the inner one"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, inner):
    rates = {}

    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = plain = sgd(own)
        scheduler = SCHEDULERS[name](plain) if inner or comm is None else None
        if comm is not None:
            opt = create_multi_node_optimizer(plain, comm, **EAGER)
            scheduler = scheduler or SCHEDULERS[name](opt)
        history, rates[comm] = [], []
        for t in range(5):
            plain_step(own, opt, comm, t)
            scheduler.step()
            rates[comm].append((scheduler.get_last_lr(), opt.param_groups[0]["lr"]))
            history.append(flat(own))
        return history

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = train(None)
        histories = phalanx.run_local(2, train)
    agree(histories)
    close(histories[0], wanted)
    assert all(own == rates[None] for own in rates.values())
    assert len(set(map(str, rates[None]))) > 1


def test_edits_of_param_groups():
    def step(model, opt, comm, t):
        opt.param_groups[0]["lr"] = 0.2 / (t + 1)
        opt.param_groups[0]["momentum"] = 0.1 * t
        plain_step(model, opt, comm, t)

    close(together(3, step, **EAGER), alone(step))


# ---- GradScaler -------------------------------------------------------------------------------------------------------------


def scaled_training(comm, poison, *, unscale=False, options=EAGER, steps=6):
    """`poison(rank, t)`: whether that rank's loss is infinite in step t. Returns parameters and scales after each step."""
    own = copy.deepcopy(SMALL)
    opt = sgd(own) if comm is None else create_multi_node_optimizer(sgd(own), comm, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    history, scales = [], []
    for t in range(steps):
        opt.zero_grad()
        bad = any(poison(rank, t) for rank in range(3)) if comm is None else poison(comm.rank, t)
        scaler.scale(loss_of(own, comm, t) * (float("inf") if bad else 1.0)).backward()
        if unscale:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.05)
        scaler.step(opt)
        scaler.update()
        history.append(flat(own))
        scales.append(scaler.get_scale())
    return history, scales


@pytest.mark.filterwarnings("ignore:the mean gradient of")
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", [EAGER, {}, {"wire": torch.bfloat16}], ids=["eager", "default", "wire"])
def test_an_inf_on_one_rank_makes_all_skip_the_step(unscale, options):
    poison = lambda rank, t: (rank, t) in ((1, 0), (2, 3), (0, 4))  # noqa: E731
    wanted, wanted_scales = scaled_training(None, poison, unscale=unscale)
    results = phalanx.run_local(3, lambda comm: scaled_training(comm, poison, unscale=unscale, options=options))
    agree([history for history, _ in results])
    assert all(scales == wanted_scales for _, scales in results)
    assert len(set(wanted_scales)) > 2  # it shrank and grew
    history = results[0][0]
    assert torch.equal(history[0], flat(SMALL))
    assert torch.equal(history[3], history[2])
    assert not torch.equal(history[5], history[4])
    tolerance = 2e-2 if "wire" in options else 1e-9
    for mine, other in zip(history, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.*no gradient")
@pytest.mark.parametrize("after_inf", [False, True])
def test_a_scaler_where_one_rank_skips_backward(after_inf):
    """It has zeros, from zero_grad(set_to_none=False): it must find the mean, not its zeros, and decide as the others do."""

    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm, **EAGER)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        history = []
        for t in range(5):
            opt.zero_grad(set_to_none=False)
            if t != 3 or comm.rank != 0:
                bad = t == 2 and after_inf and comm.rank == 1
                scaler.scale(loss_of(own, comm, t) * (float("inf") if bad else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            history.append(flat(own))
        assert bool(history[-1].isfinite().all())
        return [*history, torch.tensor(scaler.get_scale())]

    agree(phalanx.run_local(3, train))


def test_a_rank_that_prints_its_learning_rate_communicates_nothing():
    """Between two backwards of one step, on one rank only: the others would never come."""

    def step(model, opt, comm, t):
        opt.zero_grad()
        for k in range(2):
            with no_sync(opt) if t % 2 and k == 0 else torch.enable_grad():
                (loss_of(model, comm, t) / 2).backward()
            if comm is not None and comm.rank == 0:
                assert opt.param_groups[0]["lr"] == 0.1
        opt.step()

    close(together(3, step, **EAGER), alone(plain_step))


def test_a_scaler_and_double_buffering_are_refused_together():
    own, opt = local(double_buffering=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(own, None, 0)).backward()
    with pytest.raises(RuntimeError, match="double_buffering"):
        scaler.step(opt)


# ---- state ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_state_dicts_are_torchs_own_and_go_both_ways(kind, tmp_path):
    make = lambda model: kind(model.parameters(), lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))  # noqa: E731
    wanted = alone(plain_step, steps=6, make=make)

    def first_half(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(make(own), comm, **EAGER)
        for t in range(3):
            plain_step(own, opt, comm, t)
        if comm.rank == 0:
            torch.save((own.state_dict(), opt.state_dict()), tmp_path / "half.pt")

    phalanx.run_local(2, first_half)
    weights, state = torch.load(tmp_path / "half.pt", weights_only=True)

    def second_half(comm, make_optimizer):
        own = copy.deepcopy(SMALL)
        own.load_state_dict(weights)
        opt = make_optimizer(own, comm)
        opt.load_state_dict(copy.deepcopy(state))  # torch takes the tensors themselves
        for t in range(3, 6):
            plain_step(own, opt, comm, t)
        return flat(own)

    plain = second_half(None, lambda own, comm: make(own))
    ours = phalanx.run_local(3, lambda comm: second_half(comm, lambda own, comm: create_multi_node_optimizer(make(own), comm)))
    torch.testing.assert_close(plain, wanted[-1], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours[0], wanted[-1], rtol=1e-6, atol=1e-8)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(ours[0], ours[2])


def test_loading_a_state_in_the_middle_of_training():
    def step(model, opt, comm, t):
        if t == 2:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        plain_step(model, opt, comm, t)

    close(together(2, step, **EAGER), alone(step))


def test_hooks_are_called_and_find_averaged_gradients():
    def train(comm):
        p = torch.nn.Parameter(torch.zeros(2))
        opt = create_multi_node_optimizer(torch.optim.SGD([p], lr=1.0), comm)
        calls = []
        handles = [
            opt.register_step_pre_hook(lambda *_: calls.append(("pre", p.grad.tolist()))),
            opt.register_step_post_hook(lambda *_: calls.append(("post", p.tolist()))),
            opt.register_state_dict_pre_hook(lambda *_: calls.append("state_dict pre")),
            opt.register_state_dict_post_hook(lambda *_: calls.append("state_dict post")),
            opt.register_load_state_dict_pre_hook(lambda *_: calls.append("load pre")),
            opt.register_load_state_dict_post_hook(lambda *_: calls.append("load post")),
        ]
        (p.sum() * comm.rank).backward()
        opt.step()
        opt.load_state_dict(opt.state_dict())
        for handle in handles:
            handle.remove()
        opt.step()
        return calls

    for calls in phalanx.run_local(3, train):
        assert calls == [
            ("pre", [1.0, 1.0]), ("post", [-1.0, -1.0]), "state_dict pre", "state_dict post", "load pre", "load post"
        ]  # fmt: skip


def test_a_model_with_our_hooks_can_be_copied_and_saved(tmp_path):
    own, opt = local()
    plain_step(own, opt, None, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(own)
        torch.save(own, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(flat(twin), flat(own))
    assert torch.equal(flat(loaded), flat(own))
    loss_of(twin, None, 0).backward()  # the hooks stayed with the original
