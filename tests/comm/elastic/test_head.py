"""When a job is over, from what agents write on its board."""

from __future__ import annotations

import time

import pytest

from phalanx.comm.elastic import coordinator, head, line
from phalanx.comm.elastic.agents import AgentKeys, Card, End
from phalanx.comm.elastic.board import Ready
from phalanx.comm.elastic.head import Head

DEADLINE = 30.0


class Job:
    """An agent without ranks that holds the meeting point, and two others with a rank each, which have formed a world."""

    def __init__(self, board, monkeypatch):
        for name, seconds in (("BEAT", 0.01), ("SUSPECT", 0.05), ("STILL", 0.1), ("ASLEEP", DEADLINE)):
            monkeypatch.setattr(head, name, seconds)
            monkeypatch.setattr(coordinator, name, seconds)
        self.board, self.keys, self.words, self.count = board, AgentKeys(board.another()), [], 0
        self.head = Head(board, 2, 300.0, self.words.append)
        self.head.own = self.keys.introduce(Card("login", "10.0.0.1", 1, 0, "a", "a"))
        self.hosts = [self.keys.introduce(Card(f"node{n}", f"10.0.0.{n + 2}", 1, 1, f"t{n}", f"p{n}")) for n in range(2)]
        for member, agent in enumerate(self.hosts):
            self.keys.started(agent, [self.keys.claim_member(agent, member)])
            board.be_ready(member, Ready())
        self.look(self.hosts)
        for member in range(2):
            board.stand(1, member)
        self.look(self.hosts)
        assert self.head.coordinator.roster.stands

    def look(self, live=()):
        self.count += 1
        for agent in (self.head.own, *live):
            self.keys.live(agent, self.count, 0)
        return self.head.look()

    def until_over(self, live=()):
        """The exit code, if the job has one."""
        end = time.monotonic() + DEADLINE
        while (code := self.look(live)) is None and not self.head.deserted:
            assert time.monotonic() < end
            time.sleep(0.01)
        return code


@pytest.fixture
def job(board, monkeypatch):
    return Job(board, monkeypatch)


def test_a_job_begins_again_if_all_hosts_fall_silent(job):
    assert job.until_over() is None
    assert job.head.deserted
    (line,) = [line for line in job.words if "no rank is left" in line]
    assert "node0 (10.0.0.2), node1 (10.0.0.3) fell silent" in line
    assert "when 2 hosts have come, within 300 s (--wait)" in line


def test_it_begins_again_if_the_last_host_falls_silent(job):
    job.keys.ended(0, End(-9))
    assert job.until_over(live=job.hosts[:1]) is None
    assert job.head.deserted


@pytest.mark.parametrize(("ends", "code"), [((3, 4), 4), ((0, 0), 0), ((-9, -9), 137)])
def test_it_is_over_if_the_processes_have_ended(job, ends, code):
    for member, end in enumerate(ends):
        job.keys.ended(member, End(end))
    assert job.until_over(live=job.hosts) == code
    assert not job.head.deserted


def test_it_is_over_if_a_rank_reached_the_end_before_the_others_fell_silent(job):
    job.keys.ended(0, End(0))
    assert job.until_over(live=job.hosts[:1]) == 0
    assert not job.head.deserted


def test_a_signal_ends_a_job_whose_hosts_are_silent(job):
    job.head.signal(15)
    assert job.until_over() == 143
    assert not job.head.deserted


def bans_after(job, signs):
    """How often a host was banned that fell silent once, and then gave this many more signs of life."""
    (there, silent), last, end = job.hosts, job.count, time.monotonic() + DEADLINE
    while not any("may have ranks again" in line for line in job.words):
        job.look([there])
        assert time.monotonic() < end
        time.sleep(0.01)
    for sign in range(1, signs + 1):
        job.keys.live(silent, last + sign, 0)
        time.sleep(2 * head.BEAT)
        job.look([there])
    until = time.monotonic() + 5 * head.STILL
    while time.monotonic() < until:
        job.look([there])
        time.sleep(0.01)
    return sum("may have ranks again" in line for line in job.words)


@pytest.mark.parametrize("signs", [0, 1])
def test_one_cut_bans_a_host_once(job, signs):
    """When a cut heals, TCP delivers the last sign of life of an agent that has given up."""
    assert bans_after(job, signs) == 1, job.words


def test_a_host_that_is_back_can_be_banned_again(job):
    assert bans_after(job, 2) == 2, job.words


def test_an_agent_that_has_given_up_gives_no_more_signs_of_life(board, monkeypatch):
    """Its ranks may need half a minute to save and end, and the network may work again meanwhile."""
    monkeypatch.setattr(line, "BEAT", 0.01)
    keys = AgentKeys(board.another())
    agent = keys.introduce(Card("node0", "10.0.0.2", 1, 1, "t", "p"))
    talking = line.Line(AgentKeys(board.another()), agent, lambda: 0, far=False)
    try:
        end = time.monotonic() + DEADLINE
        while (keys.pulse(agent) or (0, 0))[0] < 3:
            assert time.monotonic() < end
            assert not talking.lost()
            time.sleep(0.01)
        monkeypatch.setattr(line, "LOST", -1.0)
        assert talking.lost()
        time.sleep(0.2)  # the one under way
        last = keys.pulse(agent)
        talking.post(lambda _: None)
        time.sleep(0.2)
        assert keys.pulse(agent) == last
    finally:
        talking.close()
