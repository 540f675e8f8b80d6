"""What a script may do with any `sync`: one argument changes, and nothing else."""

import pytest
import torch

import phalanx


@pytest.mark.parametrize("sync", [None, phalanx.Gossip(patience=30.0)], ids=["all-reduce", "gossip"])
def test_all_reduce_and_gossip_are_one_script(sync):
    def script(comm):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        phalanx.init_parameters_(model, seed=0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = phalanx.create_multi_node_optimizer(inner, comm, sync=sync)
        opt.follow(model)
        x = torch.arange(20.0).view(5, 4) * (comm.rank + 1)
        for _ in range(3):
            opt.zero_grad()
            model(x).pow(2).sum().backward()
            opt.step()
        own = model[1].running_mean.clone()
        opt.average_()
        return own, model[1].running_mean.clone(), opt.spread(), [p.detach().clone() for p in model.parameters()]

    told = phalanx.run_local(3, script)
    own, averaged, spreads, params = zip(*told)
    assert not torch.equal(own[0], own[1])
    assert all(torch.equal(x, averaged[0]) for x in averaged)
    if sync is None:
        torch.testing.assert_close(averaged[0], torch.stack(own).mean(0))
    assert max(spreads) == 0.0
    assert all(torch.equal(x, y) for each in params for x, y in zip(each, params[0]))
