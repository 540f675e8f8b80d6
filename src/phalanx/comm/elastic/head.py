"""The agent that holds the meeting point also leads the job: it knows all agents and their ranks, and when the job is over.

    agents ---- who they are, which ranks they started, how these ended, signs of life ----> Head.look
    agents <--- orders: pass a signal on, these ranks are out, end with this code ---------- Head

The coordinator decides who is a member. The head tells it which processes have ended, and which hosts are silent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping

from phalanx.comm.elastic.agents import AgentKeys, End, Host, Order
from phalanx.comm.elastic.board import Board
from phalanx.comm.elastic.coordinator import ASLEEP, BEAT, STILL, SUSPECT, Coordinator
from phalanx.comm.elastic.guard import FENCED
from phalanx.comm.elastic.links import Ban, to_give_up
from phalanx.comm.elastic.probing import Probing
from phalanx.comm.elastic.quorum import Quorum, Rule, beginning_again, pausing, stopping

TOO_FEW = 74  # the exit code when fewer ranks are left than the script wants: EX_IOERR of sysexits.h
GRACE = 30.0  # seconds that ranks have to end after a signal, or after the job has failed
FAREWELL = 5.0  # seconds that agents have to read the last order
NOT_YET = 1 << 30  # ranks that the first world waits for while hosts are missing


class Head:
    """Leads one job of `hosts` agents. `wait`: seconds to wait for hosts, at the start and when too few ranks are left."""

    def __init__(self, board: Board, hosts: int, wait: float, say: Callable[[str], None], quorum: Rule = "majority") -> None:
        self._board, self._keys, self._hosts, self._wait, self._say = board, AgentKeys(board), hosts, wait, say
        self.own = -1  # the number of the agent in this process
        self.coordinator = Coordinator(board, NOT_YET, say=say, admits=self._admits)
        self._probing = Probing(self._keys, self.order)
        self._bans: dict[str, Ban] = {}  # by the name of a host, which outlives its agent
        self._curious = False  # a host waits outside, and may come in if its links work
        self.agents: dict[int, Host] = {}
        self.codes: dict[int, int] = {}  # in the order in which ranks ended
        self.given_up: set[int] = set()
        self._were_in: set[int] = set()
        self._orders = itertools.count()
        self._rung: bytes | None = b"never"
        self._begun = self._looked = time.monotonic()
        self._listened = 0.0
        self._until = float("inf")  # when ranks that do not end are killed
        self._code: int | None = None  # of the job, if it is decided before its ranks have ended
        self._short_since: float | None = None
        self._quorum = Quorum(quorum)
        self._paused: float | None = None  # when the ranks that are left became a minority
        self.deserted = False  # all ranks fell silent with their hosts: a new job has to begin, with new ranks

    def signal(self, number: int) -> None:
        """The user wants the job to end."""
        self.order(Order("signal", number))
        if self._code is None or self._code < 128:
            self._code = 128 + number
        self._until = time.monotonic() + GRACE

    def order(self, order: Order) -> None:
        self._keys.order(next(self._orders), order)

    def look(self) -> int | None:
        """See what has changed. Returns the exit code of the job once it is over."""
        now = time.monotonic()
        if now - self._looked > ASLEEP:  # this process was stopped: no sign of life could be heard
            for host in self.agents.values():
                host.heard = now
        self._looked = now
        ended = self._read() if (rung := self._board.rung()) != self._rung else {}
        self._rung = rung
        if now - self._listened > BEAT:
            self._listened = now
            self._listen(now)
        silent = self._silent_hosts(now)
        vanished = self._give_up(silent, now)
        lost = vanished | self._cut_off(silent, now)
        self._quorum = self._quorum.silent(self._members & vanished.keys(), now).ended(self.codes)
        self.coordinator.needs = self._quorum.needs
        spared = {member for agent in silent for member in self.agents[agent].members}
        begun = self.coordinator.proposal is not None
        words = {member: str(end) for member, end in ended.items() if member not in self.given_up} | lost
        given_up = self.coordinator.look(words, None if begun else self._expected(), spared)
        if not begun and self.coordinator.proposal is not None:
            self.order(Order("begin", members=self.coordinator.proposal.members))
        fenced = [member for member, end in ended.items() if end.code == FENCED and member not in self.given_up]
        if given_up or fenced:
            self.order(Order("out", 0, (*given_up, *fenced)))
        if lost:
            self.order(Order("out", 1, tuple(lost)))
        self.given_up |= {**lost, **given_up}.keys()
        roster = self.coordinator.roster  # a short program may have stood and left since the last look
        self._were_in |= roster.standing | dict(roster.gone).keys()
        self._pause(now)
        return self._decide(now)

    def close(self, code: int) -> None:
        """Tell all agents, and wait until they know."""
        self.order(Order("over", code))
        others = [agent for agent, host in self.agents.items() if host.here and agent != self.own]
        until = time.monotonic() + FAREWELL
        while time.monotonic() < until and any(self._keys.has_left(agent) is None for agent in others):
            time.sleep(0.02)

    # ---- what agents report ----------------------------------------------------------------------------------------------------

    def _read(self) -> dict[int, End]:
        """New agents, new members, and members that have ended."""
        while (card := self._keys.card(len(self.agents))) is not None:
            before = [member for host in self.agents.values() if host.card.process == card.process for member in host.members]
            self._quorum = self._quorum.ended(before)  # an agent that comes back has ended its ranks
            self.agents[len(self.agents)] = Host(card, time.monotonic())
        ended: dict[int, End] = {}
        for agent, host in self.agents.items():
            for member in self._keys.members(agent):
                if member not in host.members:
                    host.members.append(member)
                    self.coordinator.expect(member)
                if member not in self.codes and (end := self._keys.end_of(member)) is not None:
                    self.codes[member], ended[member] = end.code, end
            host.left = host.left or self._keys.has_left(agent) is not None
        return ended

    def _listen(self, now: float) -> None:
        for agent, host in self.agents.items():
            # When a cut heals, TCP delivers the sign of life that was under way, though the agent may have given up. An agent
            # that has given up gives no other, and one that has not gives the next: two of them prove that it is still there.
            news = 2 if host.lost else 1
            if (pulse := self._keys.pulse(agent)) is not None and pulse[0] >= host.count + news:
                host.count, host.budget = pulse
                host.heard, host.lost = now, False

    # ---- hosts that are lost ---------------------------------------------------------------------------------------------------

    def _silent_hosts(self, now: float) -> dict[int, float]:
        """Agents that are silent with all their ranks, and for how long."""
        found: dict[int, float] = {}
        for agent, host in self.agents.items():
            if host.here:
                seconds = now - max([host.heard, *(self.coordinator.heard(member) for member in self._running_on(host))])
                if seconds > SUSPECT:
                    found[agent] = seconds
        return found

    def _give_up(self, silent: Mapping[int, float], now: float) -> dict[int, str]:
        """The members of hosts that are silent for too long. If connections broke too, that is sooner."""
        limit = SUSPECT if self.coordinator.is_broken else STILL
        lost: dict[int, str] = {}
        for agent, seconds in silent.items():
            host = self.agents[agent]
            if seconds <= limit:
                continue
            host.lost = True
            if limit == STILL:  # no connection broke, as they do when processes die: the network is at fault
                self._ban(host, now)
            lost |= dict.fromkeys(
                self._running_on(host), f"was on {host.card.name}, which gave no sign of life for {seconds:.1f} s"
            )
        return lost

    def _cut_off(self, silent: Collection[int], now: float) -> dict[int, str]:
        """The members of hosts at dead links, if the job is stuck: all are alive, but they cannot reach each other."""
        with_ranks = {agent: host for agent, host in self.agents.items() if host.here and host.card.port and agent not in silent}
        wanted = self._curious or self.coordinator.is_stuck(now)
        dead = self._probing.look(now, {agent: host.card for agent, host in with_ranks.items()}, wanted=wanted)
        self._curious = False
        inside = {agent: len(self._members.intersection(host.members)) for agent, host in with_ranks.items()}
        dead = frozenset(link for link in dead if all(inside.get(agent) for agent in link))
        lost: dict[int, str] = {}
        if dead and self.coordinator.is_stuck(now):
            for agent in to_give_up(dead, inside, self.own):
                host = self.agents[agent]
                others = [other for link in dead if agent in link for other in link if other != agent]
                links = " and ".join(self.agents[other].card.name for other in others)
                words = f"was on {host.card.name}, whose link to {links} is dead"
                lost |= dict.fromkeys(self._running_on(host), words)
                self._ban(host, now)
        return lost

    def _pause(self, now: float) -> None:
        """The ranks that are left wait while they are a minority. Print when that begins and when it ends."""
        size, needs = len(self._members), self._quorum.needs
        if 0 < size < needs and self._paused is None:
            self._paused = now
            self._say(pausing(size, needs, self._missing_hosts(), self._wait))
        elif size >= max(1, needs) and self.coordinator.roster.stands:
            if self._paused is not None:
                self._say(f"training continues, with {size} ranks, after a pause of {now - self._paused:.1f} s")
            self._paused = None
            self.coordinator.resume()
            self._quorum = self._quorum.trains(size, now)

    def _missing_hosts(self) -> list[str]:
        return [host.card.name for host in self.agents.values() if self._quorum.missing.intersection(host.members)]

    def _ban(self, host: Host, now: float) -> None:
        ban = self._bans[host.card.name] = self._bans.get(host.card.name, Ban()).again(now)
        self._say(f"{host.card.name} may have ranks again in {ban.until - now:.0f} s, if its links work")

    def _admits(self, member: int) -> bool:
        """Whether the host of this member may have members again, after its links failed."""
        now = time.monotonic()
        agent = next((agent for agent, host in self.agents.items() if member in host.members), -1)
        ban = self._bans.get(self.agents[agent].card.name, Ban()) if agent >= 0 else Ban()
        if not ban.times:
            return True
        if now < ban.until:
            return False
        others = {other for other, host in self.agents.items() if other != agent and self._members.intersection(host.members)}
        if self._probing.reaches(agent, others, now):
            self._bans[self.agents[agent].card.name] = ban.let_in(now)
            return True
        self._curious = True
        return False

    def _running_on(self, host: Host) -> list[int]:
        return [member for member in host.members if member not in self.codes and member not in self.given_up]

    # ---- is it over? -----------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> set[int]:
        return {member for host in self.agents.values() if not host.lost for member in self._running_on(host)}

    @property
    def _members(self) -> set[int]:
        return set(self.coordinator.proposal.members) if self.coordinator.proposal is not None else set()

    def _have_come(self) -> bool:
        return sum(1 for host in self.agents.values() if host.here and host.card.ranks) >= self._hosts

    def _coming(self) -> int:
        """Ranks that agents are about to start for the first time."""
        return sum(max(0, host.card.ranks - len(host.members)) for host in self.agents.values() if host.here)

    def _expected(self) -> int:
        """How many ranks the first world waits for."""
        return len(self._running) + self._coming() if self._have_come() else NOT_YET

    def _decide(self, now: float) -> int | None:
        proposal, running = self.coordinator.proposal, self._running
        begun = proposal is not None
        if now > self._until:
            return self._outcome()
        # a rank that was never a member came too late; the others may still save what they have learned
        if proposal is not None and not proposal.members and not running & self._were_in:
            silent = self._quorum.missing.intersection(dict(proposal.left))
            self.deserted = bool(silent) and self._code is None and 0 not in self.codes.values()
            if self.deserted:
                self._say(beginning_again(self._missing_hosts(), self._hosts, self._wait))
            return None if self.deserted else self._outcome()
        if not running and (begun or (self._have_come() and not self._coming()) or self._code is not None):
            return self._outcome()
        if self._code is None and (why := self._too_few(now) or self._no_majority(now)):
            self._say(why)
            self._board.stop(why)
            self._code, self._until = TOO_FEW, now + GRACE
        return None

    def _too_few(self, now: float) -> str:
        """Why the job has to end: fewer ranks are left than it wants, and no more will come. Empty if it can continue."""
        proposal = self.coordinator.proposal
        if proposal is None:
            came = sum(1 for host in self.agents.values() if host.here and host.card.ranks)
            late = not self._have_come() and now - self._begun > self._wait
            return f"{came} of {self._hosts} hosts have come within {self._wait:g} s" if late else ""
        if not self.coordinator.roster.stands:
            return ""
        coming = self._running - set(proposal.members)
        budget = sum(host.budget for host in self.agents.values() if host.here)
        finished = any(code == 0 for code in self.codes.values())
        if len(proposal.members) >= self.coordinator.wants.least or coming or budget or finished:
            self._short_since = None
            return ""
        self._short_since = self._short_since or now
        if self._hosts > 1 and now - self._short_since < self._wait:
            return ""  # another host may take the place of the lost one
        return f"{len(proposal.members)} of at least {self.coordinator.wants.least} ranks are left, and no more will come"

    def _no_majority(self, now: float) -> str:
        """Why the job has to end: its majority did not come back. Empty if it can continue."""
        over = self._paused is not None and now - self._paused > self._wait and 0 not in self.codes.values()
        return stopping(self._wait) if over else ""

    def _outcome(self) -> int:
        """0 if the job survived its losses: a rank reached the end of its script, and none raised after that."""
        if self._code is not None:
            return self._code
        codes = [code for member, code in self.codes.items() if member not in self.given_up and code != FENCED]  # in order
        if 0 in codes:
            return next((code for code in codes[codes.index(0) :] if code > 0), 0)
        last = codes[-1] if codes else 1
        return last if last > 0 else 128 - last
