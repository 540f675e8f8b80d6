"""Training loops as people write them, on several ranks with the two lines changed: the same numbers as on one, to 10 digits.

Each clips, unscales or accumulates directly after backward(), as it would with DDP or alone.
"""

import contextlib
import copy

import pytest
import torch
from tests.long import often
from tests.optim.oracle import AllReduce, create_multi_node_optimizer
from torch.nn import functional as F

import phalanx

VOCABULARY, CONTEXT, BATCH = 17, 12, 12
TEXT = torch.randint(0, VOCABULARY, (40, BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


class Transformer(torch.nn.Module):
    """A GPT of one block, its output tied to its input."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, 16)
        self.places = torch.nn.Parameter(0.02 * torch.randn(CONTEXT, 16))
        self.query = torch.nn.Linear(16, 48, bias=False)
        self.project = torch.nn.Linear(16, 16)
        self.wide, self.narrow = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(3))
        self.head = torch.nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        q, k, v = self.query(self.norms[0](x)).split(16, -1)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return self.head(self.norms[2](x))


torch.manual_seed(1)
MODEL = Transformer().double()


def batch(comm, t):
    """This rank's samples of batch t, and what comes after each of their tokens."""
    mine = TEXT[t] if comm is None else TEXT[t].chunk(comm.size)[comm.rank]
    return mine[:, :-1], mine[:, 1:]


def loss_of(model, comm, t):
    x, y = batch(comm, t)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def wrap(optimizer, comm, **options):
    return optimizer if comm is None else create_multi_node_optimizer(optimizer, comm, **options)


def adamw(model):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def nano(model, opt, comm):
    """nanoGPT's: accumulation, a scaler that is disabled on the CPU, clipping after unscale_."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    norms = []
    for t in range(6):
        for group in opt.param_groups:
            group["lr"] = 1e-2 * (1 - t / 10)
        for micro in range(2):
            loss = loss_of(model, comm, 2 * t + micro) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
    return norms


def mini(model, opt, comm):
    """minGPT's: zero_grad on the model, backward, clip, step."""
    norms = []
    for t in range(8):
        model.zero_grad(set_to_none=True)
        loss_of(model, comm, t).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
    return norms


def mini_ddp(model, opt, comm):
    """minGPT-ddp's with AMP: a scaler that scales, unscales and sometimes skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    norms = []
    for t in range(8):
        opt.zero_grad(set_to_none=True)
        loss = loss_of(model, comm, t)
        scaler.scale(loss * float("inf") if t == 4 else loss).backward()
        scaler.unscale_(opt)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).nan_to_num(0.0))
        scaler.step(opt)
        scaler.update()
    return [*norms, torch.tensor(scaler.get_scale(), dtype=torch.float64)]


def quiet(model, opt, comm):
    """Accumulation inside no_sync, by value clipping, a scheduler, and the norms of single layers logged."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)
    norms = []
    for t in range(6):
        opt.zero_grad()
        with opt.no_sync() if comm is not None else contextlib.nullcontext():
            (loss_of(model, comm, t) / 2).backward()
        (loss_of(model, comm, t + 8) / 2).backward()
        norms += [p.grad.norm() for p in model.parameters()]
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()
        schedule.step()
    return norms


def by_hand(model, opt, comm):
    """Gradients scaled, normalised and replaced in every way there is."""
    for t in range(8):
        opt.zero_grad()
        loss_of(model, comm, t).backward()
        for i, p in enumerate(model.parameters()):
            if i % 4 == 0:
                p.grad.data = p.grad.data / (1 + p.grad.data.norm())
            elif i % 4 == 1:
                p.grad = p.grad.sign() * 0.01
            elif i % 4 == 2:
                p.grad.mul_(0.5)
            elif t % 2:
                p.grad = None
        opt.step()
    return []


LOOPS = {loop.__name__: loop for loop in (nano, mini, mini_ddp, quiet, by_hand)}
OPTIONS = {
    "default": {},
    "overlap": {"sync": AllReduce(overlap=True, check_every=1), "bucket_bytes": 2000},
    "after": {"sync": AllReduce(overlap=False), "bucket_bytes": 2000},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("n", "options"), [(2, "default"), (3, "overlap"), (2, "after"), *often((3, "default"), (2, "overlap"), (3, "after"))]
)
def test_a_loop_computes_what_it_computes_alone(loop, n, options):
    def train(comm):
        own = copy.deepcopy(MODEL)
        norms = LOOPS[loop](own, wrap(adamw(own), comm, **OPTIONS[options]), comm)
        return [p.detach() for p in own.parameters()], norms

    (wanted, norms), *_ = [train(None)]
    for mine, own_norms in phalanx.run_local(n, train, timeout=30):
        for p, q in zip(mine, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        for a, b in zip(own_norms, norms, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


CONVERSIONS = {
    "double": lambda model: model.double(),
    "half": lambda model: model.bfloat16(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "p.data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "grad.data": lambda model: [setattr(p.grad, "data", p.grad.data * 0.5) for p in model.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("what", CONVERSIONS)
@pytest.mark.parametrize("when", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("options", ["overlap", *often("default")])
def test_replicas_stay_equal_whatever_is_done_to_the_model(what, when, options):
    """In step 3, on all ranks: what one process computes is not the question, but that all ranks go on alike."""
    torch.manual_seed(2)
    start = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2)
    )
    x = torch.randn(8, 6, 3, 8, 8)

    def train(comm):
        own = copy.deepcopy(start)
        opt = wrap(torch.optim.SGD(own.parameters(), lr=0.05), comm, **OPTIONS[options])
        history = []
        for t in range(6):
            opt.zero_grad()
            if t == 3 and when == "before backward":
                CONVERSIONS[what](own)
            mine = x[t] if comm is None else x[t].chunk(comm.size)[comm.rank]
            (own(mine.to(own[0].weight.dtype)) ** 2).mean().backward()
            if t == 3 and when == "before step":
                CONVERSIONS[what](own)
            opt.step()
            if t == 3 and when == "after step":
                CONVERSIONS[what](own)
            history.append(torch.cat([p.detach().reshape(-1).double() for p in own.parameters()]))
        return history

    results = phalanx.run_local(2, train, timeout=30)
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    if what != "half":
        for mine, wanted in zip(results[0], train(None), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
