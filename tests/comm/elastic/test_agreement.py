"""The agreement in one process: every member is a small machine, and an adversary chooses who moves, who dies and who comes.

A world is simulated as the transports behave: a rank can get the result of a round once all ranks have begun it, whatever happens
to the others afterwards, and can leave the commit only when all ranks hold the result.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from phalanx.comm.elastic.agreement import Proposal, Report, Roster, StateLostError, Verdict, conclude

ROUNDS = 6


@dataclass
class Member:
    """One process: what it has applied, and where it is in its round."""

    number: int
    applied: list | None  # contributors of every round it has committed; None: a newcomer without state
    world: Proposal | None = None
    phase: str = "idle"  # idle, begun, holds, committed; or calling: at the roll call of `target`
    held: tuple = ()
    target: int = 0
    done: bool = False
    between: bool = True  # at the place where newcomers are let in


class Job:
    """All processes and the coordinator. `play` makes random moves until everybody is done."""

    def __init__(self, size: int, seed: int, kills: int, joins: int) -> None:
        self.random = random.Random(seed)
        self.roster = Roster(first=size)
        self.members = {n: Member(n, []) for n in range(size)}
        for n in range(size):
            self.roster = self.roster.came(n)
        self.reports: dict[tuple[int, int], Report] = {}
        self.kills, self.joins, self.glitches, self.next = kills, joins, 1, size
        self.progress: dict[int, dict[int, str]] = {}  # epoch -> member -> how far it is in the present round of that world
        self.wanted: dict[tuple[int, int], int] = {}  # (epoch, round) -> the newest epoch that a rank had seen at its commit
        self.canon: dict[int, tuple] = {}  # round -> contributors, as far as a survivor applied it

    # -- the moves

    def play(self) -> None:
        for _ in range(20_000):
            moves = [move for move in self.moves() if move is not None]
            if not moves:
                break
            self.random.choice(moves)()
        alive = [m for m in self.members.values() if m.applied is not None]
        assert all(m.done for m in alive), "somebody waits for ever"

    def moves(self):
        for m in list(self.members.values()):
            yield from self.moves_of(m)
        victim = self.random.choice(list(self.members.values()))
        if self.kills and not victim.done and (victim.applied is None or len(self.with_state()) > 1):
            yield lambda: self.kill(victim)
        if self.glitches and self.roster.proposal is not None:
            yield self.glitch
        if self.joins and self.roster.proposal is not None and any(not m.done for m in self.members.values()):
            yield self.join

    def with_state(self):
        return [m for m in self.members.values() if m.applied is not None and not m.done]

    def moves_of(self, m: Member):
        newest = self.roster.proposal
        if newest is None or m.number not in newest.members or m.done:
            return
        if m.phase == "calling":
            if newest.epoch > m.target:
                yield lambda: self.call(m)
            elif all((m.target, n) in self.reports for n in newest.members):
                yield lambda: self.enter(m)
            return
        if m.world is None:
            yield lambda: self.call(m)
            return
        here = self.progress.setdefault(m.world.epoch, {})
        interrupted = newest.ends(m.world.members)
        if m.phase == "idle":
            if len(m.applied) == ROUNDS:
                yield lambda: self.finish(m)
            elif interrupted or m.target > m.world.epoch:  # `target` > epoch: all agreed to admit newcomers
                yield lambda: self.call(m)
            else:
                yield lambda: self.begin(m)
            return
        others = [self.members[n] for n in m.world.members if n in self.members]
        hung_up = any(other.phase == "calling" or other.world != m.world for other in others)
        if interrupted or (hung_up and newest.epoch > m.world.epoch):
            yield lambda: self.call(m)
        round_ = len(m.applied)
        ranks = m.world.members
        if m.phase == "begun" and all(here.get((n, round_)) for n in ranks):
            yield lambda: self.get_result(m)
        if m.phase == "holds" and all(here.get((n, round_)) in ("holds", "committed") for n in ranks):
            yield lambda: self.commit(m)

    def begin(self, m):
        m.phase, m.between = "begun", False
        self.progress[m.world.epoch][m.number, len(m.applied)] = "begun"

    def get_result(self, m):
        m.phase, m.held = "holds", (m.world.epoch, m.world.members)
        self.progress[m.world.epoch][m.number, len(m.applied)] = "holds"
        key = (m.world.epoch, len(m.applied))
        self.wanted[key] = max(self.wanted.get(key, 0), self.roster.proposal.epoch)

    def commit(self, m):
        epoch, round_ = m.world.epoch, len(m.applied)
        self.progress[epoch][m.number, round_] = "committed"
        wanted = self.wanted[epoch, round_]
        m.applied.append(m.held)
        m.phase, m.held, m.between = "idle", (), True
        if wanted > epoch:
            m.target = wanted

    def call(self, m):
        newest = self.roster.proposal
        m.phase, m.target = "calling", newest.epoch
        committed = None if m.applied is None or m.number in newest.joined else len(m.applied)
        between = m.between and not m.held
        self.reports[newest.epoch, m.number] = Report(committed, bool(m.held), between)

    def enter(self, m):
        newest = self.roster.proposal
        reports = [self.reports[newest.epoch, n] for n in newest.members]
        found = conclude(reports)
        if found.too_early:
            self.roster = self.roster.broke(newest.epoch)
            return
        verdict = found.verdicts[newest.members.index(m.number)]
        if verdict is Verdict.COMMIT:
            m.applied.append(m.held)
        if verdict is Verdict.HEAL:
            source = self.members.get(newest.members[found.source])
            if source is None:  # it died while it sent
                m.phase, m.world = "idle", None
                return
            state = list(source.applied)
            if len(state) < found.committed:
                state.append(source.held)  # the source commits first
            m.applied = state[: found.committed]
        m.phase, m.held, m.world, m.between = "idle", (), newest, True
        assert len(m.applied) == found.committed
        assert set(m.world.members) & {m.number}
        self.roster = self.roster.stood(newest.epoch, m.number)

    def glitch(self):
        """Connections break, and nobody has died: whoever is in a round fails in it."""
        self.glitches -= 1
        before = self.roster.proposal
        self.roster = self.roster.broke(before.epoch)
        for m in self.members.values():
            if m.world is not None and m.phase in ("begun", "holds"):
                m.phase = "calling"
                m.target = before.epoch

    def finish(self, m):
        m.done = True
        self.roster = self.roster.went({m.number: "finished"})

    def kill(self, m):
        self.kills -= 1
        del self.members[m.number]
        self.roster = self.roster.went({m.number: "was killed"})

    def join(self):
        self.joins -= 1
        self.members[self.next] = Member(self.next, None)
        self.roster = self.roster.came(self.next)
        self.next += 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_survivors_have_one_history_whoever_dies_or_comes_when(size):
    for seed in range(150):
        job = Job(size, seed, kills=random.Random(seed).randrange(4), joins=random.Random(seed + 1).randrange(4))
        job.play()
        histories = [m.applied for m in job.members.values() if m.applied is not None]
        assert histories, "the last member with state is never killed"
        assert all(history == histories[0] for history in histories), (seed, histories)
        assert len(histories[0]) == ROUNDS


def test_a_round_is_done_by_members_of_its_world_alone():
    for seed in range(100):
        job = Job(4, seed, kills=2, joins=2)
        job.play()
        for epoch, contributors in itertools.chain(*(m.applied or [] for m in job.members.values())):
            assert len(set(contributors)) == len(contributors)
            assert epoch >= 1


def test_a_mutant_that_forgets_what_it_holds_is_caught():
    """If a rank that holds a result said that it does not, the simulation above would find the fork."""
    with pytest.raises(StateLostError):
        conclude([Report(5), Report(4, holds=False)])


@pytest.mark.parametrize(
    ("reports", "committed", "verdicts"),
    [
        ([Report(4), Report(4)], 4, "rr"),
        ([Report(4, holds=True), Report(4)], 4, "rr"),  # not all hold it, so nobody has committed it
        ([Report(4, holds=True), Report(4, holds=True)], 5, "cc"),  # all hold it
        ([Report(5), Report(4, holds=True)], 5, "rc"),  # one has committed it, so it counts
        ([Report(4, between=True), Report(None)], 4, "rh"),
    ],
)
def test_conclusions(reports, committed, verdicts):
    found = conclude(reports)
    assert found.committed == committed
    assert "".join(verdict.value[0] for verdict in found.verdicts) == verdicts


def test_newcomers_come_between_two_steps_of_all_others():
    assert not conclude([Report(4, between=True), Report(4, between=True), Report(None)]).too_early
    assert conclude([Report(4, between=True), Report(3, holds=True), Report(None)]).too_early
    assert not conclude([Report(4, between=True), Report(3, holds=True)]).too_early


def test_all_know_whether_all_are_between_two_steps():
    assert conclude([Report(4, between=True), Report(4, between=True), Report(None)]).between
    assert not conclude([Report(4, between=True), Report(4)]).between
    assert not conclude([Report(4, between=True), Report(3, holds=True)]).between


def test_nobody_has_the_state():
    with pytest.raises(StateLostError, match="have left"):
        conclude([Report(None), Report(None)])


class TestRoster:
    """The coordinator's memory."""

    def start(self, count=3, **options):
        roster = Roster(first=count, **options)
        for member in range(count):
            assert roster.proposal is None
            roster = roster.came(member)
        return roster

    def stand(self, roster):
        epoch = roster.proposal.epoch
        for member in roster.proposal.members:
            roster = roster.stood(epoch, member)
        return roster

    def test_the_first_world_waits_for_all(self):
        assert self.start().proposal == Proposal(1, (0, 1, 2))

    def test_the_first_world_waits_for_fewer_if_one_dies_before(self):
        roster = Roster(first=3).came(0).came(2).went({1: "exited with code 1"}, expected=2)
        assert roster.proposal == Proposal(1, (0, 2))

    def test_a_death_makes_a_new_world(self):
        roster = self.stand(self.start()).went({0: "was killed"})
        assert roster.proposal == Proposal(2, (1, 2), left=((0, "was killed"),))
        assert roster.proposal.ends((0, 1, 2))
        assert not roster.proposal.ends((1, 2))

    def test_a_newcomer_waits_until_the_world_stands(self):
        roster = self.start().came(7)
        assert roster.proposal.epoch == 1
        roster = self.stand(roster)
        assert roster.proposal == Proposal(2, (0, 1, 2, 7), joined=(7,))
        assert not roster.proposal.ends((0, 1, 2))

    def test_a_death_sends_newcomers_back_to_the_door(self):
        roster = self.stand(self.start()).came(7).went({1: "was killed"})
        assert roster.proposal == Proposal(3, (0, 2), left=((1, "was killed"),))
        assert self.stand(roster).proposal == Proposal(4, (0, 2, 7), joined=(7,))

    def test_a_second_death_keeps_the_first_in_the_news(self):
        roster = self.stand(self.start()).went({1: "a"}).went({2: "b"})
        assert roster.proposal == Proposal(3, (0,), left=((1, "a"), (2, "b")))

    def test_no_more_than_the_most(self):
        roster = self.stand(self.start(most=4)).came(7).came(8)
        assert roster.proposal.members == (0, 1, 2, 7)
        roster = self.stand(roster)
        assert roster.proposal.epoch == 2
        assert roster.waiting == (8,)
        assert self.stand(roster.went({0: "was killed"})).proposal.members == (1, 2, 7, 8)

    @pytest.mark.parametrize("most", [1, 2, 3, 4, None])
    def test_no_more_than_the_most_in_the_first_world(self, most):
        roster = Roster(first=3, most=most).came(2).came(0).came(1)
        assert roster.proposal == Proposal(1, (0, 1, 2)[:most])
        assert roster.waiting == tuple(member for member in (2, 0, 1) if member not in roster.proposal.members)
        assert self.stand(roster).proposal == roster.proposal

    def test_a_newcomer_with_state_is_a_survivor(self):
        roster = self.stand(self.start(1)).came(7)
        assert roster.stood(2, 7).went({0: "was killed"}).proposal.members == (7,)
        assert roster.went({0: "was killed"}).proposal.members == ()

    def test_the_dead_do_not_come_back(self):
        roster = self.stand(self.start()).went({1: "was fenced"})
        assert roster.came(1) == roster
        assert roster.went({1: "again"}) == roster

    def test_when_all_are_gone_the_door_stays_closed(self):
        roster = self.stand(self.start(1)).went({0: "was killed"}).came(3)
        assert roster.proposal.members == ()


def test_proposals_and_reports_survive_the_store():
    for value in (Proposal(3, (1, 2), (2,), ((0, "was killed"),), 2), Report(4, holds=True, host="a"), Report(None)):
        assert type(value).from_json(value.to_json()) == value
