"""What torch and its users expect of any optimizer: copies, pickles, hooks, sparse gradients, distributed checkpoints."""

import copy
import pickle
import warnings

import pytest
import torch
from tests.long import LONG
from tests.optim.oracle import (
    SMALL,
    X,
    Y,
    alone,
    close,
    create_multi_node_optimizer,
    flat,
    loss_of,
    plain_step,
    sgd,
    shard,
    together,
)

import phalanx
from phalanx.grad.gossip import Gossip

SYNCS = {"all-reduce": None, "gossip": Gossip()}


@pytest.fixture
def comm():
    with phalanx.create_communicator() as made:
        yield made


# ---- copies -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_a_deep_copy_is_an_optimizer_of_its_own(comm, sync):
    model = copy.deepcopy(SMALL)
    opt = create_multi_node_optimizer(sgd(model), comm, sync=SYNCS[sync])
    plain_step(model, opt, None, 0)
    twin_model, twin = copy.deepcopy((model, opt))
    assert [id(p) for group in twin.param_groups for p in group["params"]] == [id(p) for p in twin_model.parameters()]
    assert {name for name in vars(twin) if name[0] != "_"} == {name for name in vars(opt) if name[0] != "_"}
    before = flat(model)
    assert opt.steps == 1
    plain_step(twin_model, twin, None, 1)
    assert torch.equal(flat(model), before)
    plain_step(model, opt, None, 1)  # the one that was copied still works, with the same momentum
    assert torch.equal(flat(model), flat(twin_model))
    other = create_multi_node_optimizer(sgd(copy.deepcopy(SMALL)), comm, sync=SYNCS[sync])
    other.step()


def test_copies_train_on_several_ranks():
    def train(comm):
        own = copy.deepcopy(SMALL)
        opt = create_multi_node_optimizer(sgd(own), comm)
        plain_step(own, opt, comm, 0)
        twin, copied = copy.deepcopy((own, opt))
        if comm.rank == 0:
            copy.deepcopy(opt)  # thrown away at once, on one rank alone: no message
        for t in (1, 2):
            plain_step(twin, copied, comm, t)
            plain_step(own, opt, comm, t)
        return flat(own), flat(twin)

    for mine, twin in phalanx.run_local(3, train, timeout=20):
        assert torch.equal(mine, twin)
        torch.testing.assert_close(mine, alone(plain_step, steps=3)[-1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_pickle_is_refused_in_a_sentence(comm, sync):
    opt = create_multi_node_optimizer(sgd(copy.deepcopy(SMALL)), comm, sync=SYNCS[sync])
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"cannot be pickled: .*opt\.state_dict\(\)"):
            attempt(opt)
    pickle.loads(pickle.dumps(opt.state_dict()))
    opt.step()  # and nothing is broken


# ---- hooks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_hooks_receive_the_optimizer_they_were_registered_on(comm, sync):
    model = copy.deepcopy(SMALL)
    opt = create_multi_node_optimizer(sgd(model), comm, sync=SYNCS[sync])
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o))),
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", o))),
        opt.register_state_dict_pre_hook(lambda o: seen.append(("saving", o))),
        opt.register_state_dict_post_hook(lambda o, state: seen.append(("saved", o))),
        opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(("loading", o))),
        opt.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o))),
    ]
    plain_step(model, opt, None, 0)
    opt.load_state_dict(opt.state_dict())
    assert [what for what, _ in seen] == ["before", "after", "saving", "saved", "loading", "loaded"]
    assert all(o is opt for _, o in seen)
    for handle in handles:
        handle.remove()
    plain_step(model, opt, None, 1)
    assert len(seen) == 6


# ---- every optimizer of torch -------------------------------------------------------------------------------------------------

FLAGS = [{}, {"foreach": False}, {"foreach": True}, {"maximize": True}, {"weight_decay": 0.1}]
CASES = {
    torch.optim.SGD: [
        *FLAGS,
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "fused": True},
    ],
    torch.optim.Adam: [*FLAGS, {"amsgrad": True}, {"fused": True}],
    torch.optim.AdamW: [*FLAGS, {"amsgrad": True}, {"fused": True}],
    torch.optim.NAdam: [*FLAGS, {"momentum_decay": 6e-3, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    torch.optim.RAdam: [*FLAGS, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    torch.optim.Adagrad: [*FLAGS, {"lr_decay": 0.5, "initial_accumulator_value": 0.1}],
    torch.optim.Adadelta: [*FLAGS, {"rho": 0.95}],
    torch.optim.Adamax: FLAGS,
    torch.optim.Adafactor: [{}, {"weight_decay": 0.1}, {"maximize": True}],
    torch.optim.ASGD: [*FLAGS, {"t0": 2, "lambd": 0.1}],
    torch.optim.RMSprop: [*FLAGS, {"momentum": 0.9, "centered": True}],
    torch.optim.Rprop: [{}, {"etas": (0.4, 1.3)}, {"maximize": True}],
    torch.optim.LBFGS: [{}, {"max_iter": 5, "history_size": 3}, {"line_search_fn": "strong_wolfe"}],
    torch.optim.SparseAdam: [{}, {"maximize": True}, {"betas": (0.5, 0.9)}],
    phalanx.Lars: [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True}],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("with_tensor_rate", [False, True])
def test_every_optimizer_equals_one_process(cls, with_tensor_rate):
    """Steps, a state dict into a new optimizer, a deep copy; on 2 ranks and on 1, with every option that it has."""
    for options in CASES[cls] if LONG or not with_tensor_rate else CASES[cls][:1]:
        if with_tensor_rate and (cls in (torch.optim.LBFGS, torch.optim.SparseAdam, phalanx.Lars) or options.get("foreach")):
            continue
        one_case(cls, options | ({"lr": torch.tensor(0.01)} if with_tensor_rate else {}))


def one_case(cls, options):
    sparse = cls is torch.optim.SparseAdam
    torch.manual_seed(3)
    start = [torch.nn.Embedding(30, 4, sparse=True), torch.nn.Linear(20, 4)]
    start = (start[0] if sparse else start[1]).double()

    def loss(model, comm, t):
        if sparse:
            words = shard(comm, torch.arange(60).view(12, 5) * (t + 1) % 30)
            return (model(words) ** 2).mean()
        return ((model(shard(comm, X[t])) - shard(comm, Y[t])[:, :1]) ** 2).mean()

    def train(comm):
        own = copy.deepcopy(start)

        def make(model):
            inner = cls(model.parameters(), **copy.deepcopy(options))
            return inner if comm is None else create_multi_node_optimizer(inner, comm)

        opt = make(own)
        for t in range(4):
            if t == 2:
                state = opt.state_dict()
                opt = make(own)
                opt.load_state_dict(copy.deepcopy(state))
            if t == 3 and cls is not torch.optim.LBFGS:  # its copies lack their parameters, in torch itself
                own, opt = copy.deepcopy((own, opt))

            def closure(opt=opt, own=own, t=t):
                opt.zero_grad()
                value = loss(own, comm, t)
                value.backward()
                return value

            if cls is torch.optim.LBFGS:
                opt.step(closure)
            else:
                closure()
                opt.step()
        return flat(own)

    wanted = train(None)
    for mine in phalanx.run_local(2, train, timeout=20):
        torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9, msg=lambda text: f"{cls.__name__}({options}): {text}")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none")
def test_muon():
    make = lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)  # noqa: E731
    close(together(2, plain_step, make=make), alone(plain_step, make=make), rtol=1e-2, atol=1e-4)  # it computes in bfloat16


# ---- sparse gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sparse_adam_moves_the_rows_that_some_rank_has_seen(n):
    torch.manual_seed(4)
    table = torch.nn.Embedding(50, 6, sparse=True).double()
    words = torch.randint(0, 20, (5, 12, 3))

    def step(model, opt, comm, t):
        opt.zero_grad()
        loss = (model(shard(comm, words[t])) ** 2).mean()
        if t != 3 or comm is None or comm.rank == 0 or n == 1:
            loss.backward()
        opt.step()

    make = lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1)  # noqa: E731
    history = together(n, step, steps=3, model=table, make=make)
    close(history, alone(step, steps=3, model=table, make=make))
    untouched = history[-1].view(50, 6)[20:]
    assert torch.equal(untouched, table.weight.detach()[20:])
    together(n, step, steps=5, model=table, make=make)  # a rank without a backward sends no rows


@pytest.mark.parametrize("options", [{"wire": torch.float16}, {"double_buffering": True}, {"sync": Gossip()}])
def test_sparse_adam_goes_with_nothing_that_wants_dense_gradients(comm, options):
    inner = torch.optim.SparseAdam(torch.nn.Embedding(5, 2, sparse=True).parameters())
    with pytest.raises(ValueError, match="SparseAdam"):
        create_multi_node_optimizer(inner, comm, **options)


# ---- torch's tools ------------------------------------------------------------------------------------------------------------


def test_distributed_checkpoint_state_dicts_come_back_as_they_were():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def run(comm):
        made = []
        for _ in range(2):
            own = copy.deepcopy(SMALL)
            made.append((own, create_multi_node_optimizer(torch.optim.AdamW(own.parameters(), lr=0.01), comm)))
        (model, opt), (other_model, other) = made
        for t in range(3):
            plain_step(model, opt, comm, t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = copy.deepcopy(get_optimizer_state_dict(model, opt))
            other_model.load_state_dict(model.state_dict())
            set_optimizer_state_dict(other_model, other, saved)
        for a, b in zip(opt.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)
        for t in range(3, 5):
            plain_step(model, opt, comm, t)
            plain_step(other_model, other, comm, t)
        return flat(model), flat(other_model)

    for mine, other in phalanx.run_local(2, run, timeout=20):
        assert torch.equal(mine, other)


def test_a_differentiable_step_on_parameters_that_are_no_leaves():
    def run(comm):
        start = torch.full((3,), 2.0 + comm.rank * 0, requires_grad=True)
        moving = start.clone()
        opt = create_multi_node_optimizer(torch.optim.SGD([moving], lr=0.5, differentiable=True), comm)
        moving.grad = torch.full((3,), 1.0 + comm.rank)
        opt.step()
        moving.sum().backward()
        return moving.detach(), start.grad

    for moved, grad in phalanx.run_local(2, run, timeout=20):
        assert torch.equal(moved, torch.full((3,), 2.0 - 0.5 * 1.5))
        assert torch.equal(grad, torch.ones(3))


@pytest.mark.parametrize("n", [2, 3])
def test_lbfgs_with_strong_wolfe_equals_one_process(n):
    def step(model, opt, comm, t):
        def closure():
            opt.zero_grad()
            loss = loss_of(model, comm, 0)
            loss.backward()
            return loss

        opt.step(closure)

    make = lambda model: torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")  # noqa: E731
    close(together(n, step, make=make), alone(step, make=make), rtol=1e-6, atol=1e-8)
