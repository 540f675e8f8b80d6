"""Dead links: who goes, who answers, and how long a host waits outside."""

from __future__ import annotations

import itertools
import socket

import pytest

from phalanx.comm.elastic.agents import Card, Order
from phalanx.comm.elastic.echo import NONCE, SIGNATURE, Echo
from phalanx.comm.elastic.links import FIRST_WAIT, FORGOTTEN, LONGEST_WAIT, Ban, dead_links, to_give_up
from phalanx.comm.elastic.probing import ANSWERS, CALM, FRESH, PAUSE, Probing

SECRET = "0123456789abcdef"


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_survivors_reach_each_other_and_no_host_goes_in_vain(hosts):
    every = list(itertools.combinations(range(hosts), 2))
    for count in range(len(every) + 1):
        for dead in itertools.combinations(every, count):
            gone = to_give_up(frozenset(dead), dict.fromkeys(range(hosts), 1), keeper=0)
            left = set(range(hosts)) - set(gone)
            assert 0 in left
            assert not any(set(link) <= left for link in dead)
            for agent in gone:  # with it, a dead link would be back
                assert any(set(link) <= left | {agent} for link in dead) or len(gone) > 1
            if count == 1:
                assert len(gone) == 1


def test_the_host_with_fewer_ranks_goes_and_of_equals_the_later_one():
    assert to_give_up(frozenset({(1, 2)}), {1: 2, 2: 4}, keeper=0) == [1]
    assert to_give_up(frozenset({(1, 2)}), {1: 4, 2: 4}, keeper=0) == [2]
    assert to_give_up(frozenset({(1, 2)}), {1: 4, 2: 4}, keeper=2) == [1]
    assert to_give_up(frozenset({(1, 3), (2, 3)}), {1: 1, 2: 1, 3: 8}, keeper=0) == [3]  # one instead of two


def test_a_link_is_dead_if_one_side_gets_no_answer():
    assert dead_links({0: (), 1: (2,), 2: ()}) == {(1, 2)}
    assert dead_links({0: (), 2: (1,), 1: (2,)}) == {(1, 2)}
    assert dead_links({0: (1,)}) == frozenset()  # agent 1 did not report: its silence decides


def test_each_time_a_host_waits_longer():
    ban, waits = Ban(), []
    for _ in range(6):
        ban = ban.again(100.0)
        waits.append(ban.until - 100.0)
    assert waits[0] == FIRST_WAIT
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT


def test_a_host_that_was_inside_for_a_while_begins_anew():
    ban = Ban().again(100.0).again(101.0)
    back = ban.let_in(150.0)
    assert back.let_in(155.0) == back  # it has been inside since the first time
    assert back.again(150.0 + FORGOTTEN) == Ban(150.0 + FORGOTTEN + 4 * FIRST_WAIT, 3)
    assert back.again(151.0 + FORGOTTEN) == Ban(151.0 + FORGOTTEN + FIRST_WAIT, 1)
    assert ban.again(300.0) == Ban(300.0 + 4 * FIRST_WAIT, 3)  # it was never inside


@pytest.fixture
def echoes():
    made = [Echo("127.0.0.1", SECRET, "a" * 16), Echo("127.0.0.1", SECRET, "a" * 16), Echo("127.0.0.1", SECRET, "b" * 16)]
    yield made
    for echo in made:
        echo.close()


def test_agents_answer_each_other_and_no_stranger(echoes):
    one, two, other_job = echoes
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        places = {1: ("127.0.0.1", two.port), 2: ("127.0.0.1", other_job.port), 3: silent.getsockname()}
        assert one.unreachable(places) == (2, 3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for words in (b"", b"?", bytes(NONCE + SIGNATURE), bytes(256)):
            stranger.sendto(words, ("127.0.0.1", two.port))
        with pytest.raises(TimeoutError):
            stranger.recv(256)


class Keys:
    """The answers of agents, as the head finds them."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[int, ...]] = {}

    def answered(self, probe: int, agent: int) -> tuple[int, ...] | None:
        return self.answers.get(agent)

    def forget_probe(self, probe: int, agents: list[int]) -> None:
        self.answers.clear()


def test_two_probes_in_a_row_confirm_a_dead_link():
    keys, orders = Keys(), list[Order]()
    probing = Probing(keys, orders.append)
    cards = {agent: Card("h", f"10.0.0.{agent}", 7) for agent in range(3)}
    assert probing.look(0.0, cards, wanted=False) == frozenset()
    assert not orders
    now = 0.0
    for answers, confirmed in [
        ({0: (), 1: (2,), 2: (1,)}, False),
        ({0: (), 1: (2,), 2: (1,)}, True),
        ({0: (), 1: (), 2: ()}, False),  # it came back
        ({0: (), 1: (2,), 2: ()}, False),  # and went again: once is not enough
    ]:
        now += max(PAUSE, CALM)
        assert probing.look(now, cards, wanted=True) == frozenset()
        assert orders[-1].kind == "probe"
        assert [place[0] for place in orders[-1].places] == [0, 1, 2]
        keys.answers.update(answers)
        assert probing.look(now, cards, wanted=True) == ({(1, 2)} if confirmed else frozenset())
    assert len(orders) == 4
    assert probing.reaches(0, {1, 2}, now)
    assert not probing.reaches(1, {2}, now)
    assert not probing.reaches(0, {1, 2}, now + FRESH + 1)


def test_an_agent_that_does_not_answer_holds_nobody_up():
    keys, orders = Keys(), list[Order]()
    probing = Probing(keys, orders.append)
    cards = {agent: Card("h", f"10.0.0.{agent}", 7) for agent in range(3)}
    probing.look(1.0, cards, wanted=True)
    keys.answers.update({0: (2,), 1: (2,)})
    assert probing.look(1.1, cards, wanted=True) == frozenset()
    probing.look(1.1 + ANSWERS, cards, wanted=True)
    assert not probing.reaches(2, {0}, 1.2 + ANSWERS)
    assert probing.reaches(1, {0}, 1.2 + ANSWERS)
