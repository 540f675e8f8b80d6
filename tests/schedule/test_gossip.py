"""Gossip rounds: doubly stochastic always, exactly the mean where the paper says so, with partners that everyone can compute."""

from dataclasses import replace
from fractions import Fraction

import pytest
from tests.long import LONG
from tests.schedule import oracle

from phalanx.schedule import (
    ScheduleError,
    chain,
    from_json,
    from_text,
    gossip,
    gossip_partners,
    gossip_period,
    gossip_weights,
    lower,
    show,
    to_json,
    to_text,
    verify,
)
from phalanx.schedule.exact import exact_rounds

TOPOLOGIES = ("dissemination", "hypercube", "exact")


def weights(s):
    """weights[rank][origin], by pushing one unit of each origin through the oracle."""
    columns = [oracle.run(s, [[Fraction(rank == origin)] for rank in range(s.world)]) for origin in range(s.world)]
    return [[columns[origin][rank][0] for origin in range(s.world)] for rank in range(s.world)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_is_doubly_stochastic(topology):
    for n in range(1, 34):
        for number in range(4 * gossip_period(n)):
            verify(gossip(n, number, topology, seed=n))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_doubly_stochastic_by_the_oracle_too(topology):
    for n in (1, 2, 3, 5, 6, 8, 11):
        for number in range(2 * gossip_period(n)):
            matrix = weights(gossip(n, number, topology))
            assert all(sum(row) == 1 for row in matrix)
            assert all(sum(column) == 1 for column in zip(*matrix, strict=True))
            if topology != "exact":
                assert all(weight in (0, Fraction(1, 2), 1) for row in matrix for weight in row)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 128])
def test_log2_n_rounds_are_exactly_the_mean_and_one_fewer_are_not(topology, n):
    rounds = gossip_period(n)
    for start in (0, rounds, 2 * rounds):  # in later periods, too, where partners are rotated
        number = [gossip(n, start + k, topology) for k in range(rounds)]
        verify(chain(number, goal="mean"))
        if len(number) > 1:
            with pytest.raises(ScheduleError, match="wanted 1/"):
                verify(chain(number[:-1], goal="mean"))


def test_everyone_has_heard_from_everyone_after_one_period_of_dissemination():
    for n in range(2, 34):
        period = [gossip(n, k) for k in range(gossip_period(n))]
        assert all(weight > 0 for row in weights(chain(period, goal="mixing")) for weight in row), n


def test_partners_of_the_first_period_are_the_papers():
    assert gossip_partners(8, 1) == tuple((r - 2) % 8 for r in range(8))
    assert gossip_partners(8, 2, "hypercube") == tuple(r ^ 4 for r in range(8))
    # dissemination: receive from (r + 2^k) mod n
    receives = {to: source for source, to in enumerate(gossip_partners(6, 2))}
    assert receives == {r: (r + 4) % 6 for r in range(6)}


def test_a_rank_without_a_partner_sits_the_round_out():
    assert gossip_partners(6, 2, "hypercube") == (4, 5, None, None, 0, 1)
    s = gossip(6, 2, "hypercube")
    assert {rank for op in s.steps[0].ops for rank in op.ranks} == {0, 1, 4, 5}


def test_rotation_changes_partners_every_period_and_only_then():
    for topology in TOPOLOGIES:
        period = gossip_period(16, topology)
        by_period = [[gossip_partners(16, p * period + k, topology) for k in range(period)] for p in range(12)]
        assert len({tuple(partners) for partners in by_period}) == 12
        fixed = [gossip_partners(16, p * period, topology, rotate=False) for p in range(12)]
        assert set(fixed) == {gossip_partners(16, 0, topology)}
        # within a period the same seats are used: the rounds still make the exact mean (tested above)


def test_direct_partners_become_everyone():
    """The reason for rotation: without it a rank meets log2(n) others directly, with it all of them."""
    met = {gossip_partners(16, number)[0] for number in range(200)}
    assert met == set(range(1, 16))
    assert len({gossip_partners(16, number, rotate=False)[0] for number in range(200)}) == gossip_period(16)


def test_partners_are_a_pure_function_of_seed_round_and_size():
    assert gossip_partners(8, 5, seed=1) == gossip_partners(8, 5, seed=1)
    assert len({gossip_partners(8, 5, seed=seed) for seed in range(-3, 20)}) > 15
    # the value itself is pinned: ranks that run different Pythons must agree
    assert gossip_partners(8, 5, seed=1) == (2, 7, 0, 5, 6, 3, 4, 1)


# ---- the exact mean of any number of ranks ------------------------------------------------------------------------------------


def exact_cycle(n, start=0, **options):
    return [gossip(n, start + k, "exact", **options) for k in range(gossip_period(n, "exact"))]


def test_a_cycle_is_exactly_the_mean_for_every_n_and_one_round_fewer_is_not():
    for n in range(1, 28):
        for start in (0, gossip_period(n, "exact")):  # the second is rotated
            rounds = exact_cycle(n, start, seed=n)
            verify(chain(rounds, goal="mean"))
            assert weights(chain(rounds, goal="mean")) == [[Fraction(1, n)] * n] * n or n > 11  # the oracle is slow
        for left_out in range(len(rounds)) if n < 12 else ():
            rest = rounds[:left_out] + rounds[left_out + 1 :]
            if rest:
                with pytest.raises(ScheduleError, match="wanted 1/"):
                    verify(chain(rest, goal="mean"))


@pytest.mark.parametrize(
    "numbers", [range(n, min(n + 32, 1025)) for n in range(2, 1025, 32)] if LONG else [(67, 343, 1000)], ids=str
)
def test_the_proof_holds_for_every_n_up_to_1024(numbers):
    for n in numbers:
        rounds = exact_cycle(n)
        for one in rounds:
            verify(one)
        verify(chain(rounds, goal="mean"))


def test_a_wrong_weight_is_found_by_fingerprints_and_by_fractions():
    for n in (5, 97):
        rounds = exact_cycle(n)
        t = next(t for t, pairs in enumerate(exact_rounds(n)) if any(pair.weight != Fraction(1, 2) for pair in pairs))
        scale, exchange = rounds[t].steps
        moves = list(exchange.ops)
        i = next(i for i, move in enumerate(moves) if move.factor != 1)
        moves[i] = replace(moves[i], factor=moves[i].factor + Fraction(1, 1000))
        wrong = replace(rounds[t], steps=(scale, replace(exchange, ops=tuple(moves))))
        with pytest.raises(ScheduleError, match="wanted weights that add up to 1"):
            verify(wrong)
        rounds[t] = replace(rounds[t], steps=rounds[0].steps)
        with pytest.raises(ScheduleError, match="wanted 1/"):
            verify(chain(rounds, goal="mean"))


def test_a_round_is_pairs_that_exchange_with_one_weight():
    for n in (2, 3, 5, 7, 12, 31):
        for number in range(2 * gossip_period(n, "exact")):
            sends, shares = gossip_partners(n, number, "exact"), gossip_weights(n, number, "exact")
            for rank, to in enumerate(sends):
                assert to is None or (sends[to] == rank and shares[to] == shares[rank] and to != rank)
                assert (shares[rank] == 0) == (to is None)


def test_an_even_number_of_ranks_leaves_nobody_out_and_an_odd_one_few():
    for n in range(2, 100):
        alone = [n - 2 * len(pairs) for pairs in exact_rounds(n)]
        assert all(count % 2 == n % 2 for count in alone)
        if n % 2 == 0:
            assert not any(alone), n
        else:
            assert max(alone) <= n / 3  # as 3 ranks do, and 9 in the first half
            assert {7: 1, 11: 1, 15: 1, 33: 3}.get(n, n) >= max(alone), n


def test_a_cycle_is_never_longer_than_the_papers_and_often_shorter():
    def papers(n):
        power = (n & -n).bit_length() - 1  # a hypercube for the power of two in n, 2 floor(log2 q) + 1 rounds for the odd part
        odd = n >> power
        return power + (0 if odd == 1 else 2 * (odd.bit_length() - 1) + 1)

    ours = {n: gossip_period(n, "exact") for n in range(2, 1025)}
    assert all(ours[n] <= papers(n) for n in ours)
    assert sum(ours[n] < papers(n) for n in ours) == 332
    assert [ours[n] for n in (2, 3, 4, 5, 6, 7, 8, 9, 100, 1000)] == [1, 3, 2, 5, 4, 5, 3, 6, 11, 16]
    assert all(len(exact_rounds(n)) == ours[n] for n in range(2, 130))


def test_a_round_with_weights_is_written_read_lowered_and_drawn():
    s = gossip(5, 2, "exact")
    assert from_text(to_text(s)) == s == from_json(to_json(s)) == lower(s)
    assert "add 0 -> 4 [0] by 4" in to_text(s)
    assert "+0←4*4" in show(s)
    assert "+3←2*1/2  adds chunk 3 of rank 2 times 1/2 to its own" in show(s)
    with pytest.raises(ScheduleError, match="factor -4 is negative"):
        verify(from_text(to_text(s).replace("by 4", "by -4")))
    with pytest.raises(ScheduleError, match="divides by zero"):
        from_text(to_text(s).replace("by 4", "by 4/0"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gossip(0, 0), r"gossip\(0\): a world has at least 1 rank; give n >= 1"),
        (lambda: gossip(4, -1), r"gossip: round -1 is negative; rounds count from 0"),
        (lambda: gossip(4, 0, "ring"), r"gossip: topology 'ring' is unknown; give 'dissemination', 'hypercube' or 'exact'"),
    ],
)
def test_bad_arguments_are_named_with_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
