"""Fingerprints are secrets of a process: nobody can write a wrong schedule that has the right ones."""

from dataclasses import replace
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from phalanx.schedule import Move, Scale, Schedule, ScheduleError, Step, fingerprints, lower, ring, verify
from phalanx.schedule.fingerprints import PRIME


def another_process():
    """The numbers that another process draws, which is all that the author of a file can know."""
    spec = spec_from_file_location("another", fingerprints.__file__)
    other = module_from_spec(spec)
    spec.loader.exec_module(other)
    return other


def test_a_file_made_with_the_numbers_of_another_process_does_not_pass():
    other, n = another_process(), 65
    inputs = other.random_inputs(n)
    share = sum(inputs) * pow(inputs[0], -1, other.PRIME) % other.PRIME  # x0 times this has the fingerprint of the sum
    scale, send = Scale(range(1), range(1), Fraction(share)), tuple(Move(0, k, range(1)) for k in range(1, n))
    product = Schedule("mine", n, 1, (Step((scale,)), Step(send)))
    for bitwise in (False, True):
        with pytest.raises(ScheduleError, match=r"ends as \d+\*x0, wanted x0 \+ ... \+ x64"):
            verify(product, bitwise=bitwise)
    s = lower(ring(n))
    for bitwise in (False, True):  # a weight of 1 plus a multiple of the prime
        with pytest.raises(ScheduleError, match=r"ends as \d+\*x\d+ \+ .*, wanted x0 \+ ... \+ x64"):
            verify(replace(s, steps=(Step((Scale(range(1), range(n), Fraction(1 + other.PRIME)),)), *s.steps)), bitwise=bitwise)
    mixing = Schedule("mine", n, 1, (Step((Scale(range(1), range(1), Fraction(1 + other.BOTH)),)),), "mixing")
    with pytest.raises(ScheduleError, match="wanted weights that add up to 1"):
        verify(mixing)


def test_the_modulus_is_a_prime_of_60_bits():
    for prime in (PRIME, another_process().PRIME):
        assert prime.bit_length() == 60
        assert all(pow(base, prime - 1, prime) == 1 for base in range(2, 200))
        assert all(prime % divisor for divisor in range(2, 10_000))
