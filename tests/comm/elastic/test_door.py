"""Where agents meet: from the command line and from launchers, as a pure function; and what they write about themselves."""

from __future__ import annotations

import pytest

from phalanx.comm.elastic.agents import Card, End, Order
from phalanx.comm.elastic.door import Door, find_door
from phalanx.comm.launch import LaunchError

SECRET = {"PHALANX_SECRET": "0123456789abcdef"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "0",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("meet", "hosts", "environ", "door"),
    [
        (None, None, {}, Door()),
        (None, 1, {}, Door()),
        ("node0:29400", 3, SECRET, Door("node0", 29400, 3, None)),
        ("node0", 3, SECRET, Door("node0", 29400, 3, None)),
        ("[fe80::1%eth0]:7", 2, SECRET, Door("fe80::1%eth0", 7, 2, None)),
        ("node0:7", None, SECRET | TORCHRUN, Door("node0", 7, 2, True)),
        (None, None, SECRET | TORCHRUN, Door("node0", 29500, 2, True)),
        (None, None, SECRET | TORCHRUN | {"RANK": "1"}, Door("node0", 29500, 2, False)),
        (None, None, SECRET | TORCHRUN | AGENT_STORE, Door("node0", 29501, 2, True)),  # the port itself is the launcher's
        (None, 5, SECRET | TORCHRUN, Door("node0", 29500, 5, True)),
        (None, None, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Door()),
    ],
)
def test_where_agents_meet(meet, hosts, environ, door):
    assert find_door(meet, hosts, environ) == door


def test_slurm_says_where():
    door = find_door(None, None, SECRET | SLURM)
    assert (door.host, door.hosts, door.holds) == ("gpu07", 3, False)
    assert door == find_door(None, None, SECRET | SLURM | {"SLURM_PROCID": "1"})


@pytest.mark.parametrize(
    ("meet", "hosts", "environ", "words"),
    [
        (None, 3, SECRET, "where do they meet"),
        ("node0:29400", None, SECRET, "how many hosts"),
        ("node0:29400", 2, {}, "need a secret"),
        (None, None, TORCHRUN, "need a secret"),
        ("node0:29400", 2, {"PHALANX_SECRET": "short"}, "fewer than 16"),
        ("node0:0", 2, SECRET, "is not HOST:PORT"),
        ("node0:70000", 2, SECRET, "is not HOST:PORT"),
        ("a b:1", 2, SECRET, "is not HOST:PORT"),
        ("", 2, SECRET, "is not HOST:PORT"),
    ],
)
def test_what_is_missing_is_named(meet, hosts, environ, words):
    with pytest.raises(LaunchError, match=words):
        find_door(meet, hosts, environ)


def test_what_agents_write_can_be_read_back():
    card = Card("node1", "10.0.0.2", 4711, 8, "ab", "cd")
    assert Card.from_json(card.to_json()) == card
    order = Order("probe", 1, (2, 3), ((0, "10.0.0.1", 7),))
    assert Order.from_json(order.to_json()) == order
    with pytest.raises(ValueError, match="not an order"):
        Order.from_json('["rm", 0, [], []]')
    assert [str(End(code)) for code in (0, 3, -9)] == ["finished", "exited with code 3", "was killed by signal 9"]
