# %% [markdown]
"""Ranks as threads: paste these cells into a notebook, open the file in an editor that knows cells, or run it.

    python examples/notebook.py

The same communicator, schedules, optimizer and errors as on many hosts, in one process that a debugger can stop.
"""

# %% Three ranks train together; each returns what it has
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx

source = phalanx.data.open("digits")
samples = source.x / 16, source.y


def train(comm):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    phalanx.init_parameters_(model, seed=0)  # by name: threads share torch's generator, so its seed would not do
    optimizer = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.3), comm)
    losses = []
    with phalanx.data.Loader(samples, comm, batch=120) as loader:
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            losses.append(comm.all_reduce(loss.detach(), "mean").item())
    return losses, [p.detach().clone() for p in model.parameters()]


results = phalanx.run_local(3, train)
print("losses of 3 ranks ", [round(loss, 6) for loss in results[0][0]])

# %% All ranks end with the same bits
assert all(torch.equal(p, q) for _, weights in results[1:] for p, q in zip(weights, results[0][1]))

# %% One rank does the same: the batch is that of all ranks together
((alone, weights),) = phalanx.run_local(1, train)
print("losses of 1 rank  ", [round(loss, 6) for loss in alone])
torch.testing.assert_close(results[0][1], weights, rtol=1e-4, atol=1e-5)

# %% What ran between six ranks of two hosts, drawn
schedule = phalanx.run_local(6, lambda comm: comm.schedule, hosts=2)[0]
print(phalanx.schedule.show(schedule))


# %% A mistake: rank 2 raises, and the cell shows it at once
def forgetful(comm):
    if comm.rank == 2:
        raise ValueError("rank 2 has lost its data")
    comm.barrier()


try:
    phalanx.run_local(3, forgetful)
except ValueError as error:
    print("raised in the cell:", error)
