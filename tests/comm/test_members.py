"""Members: the ranks of a communicator as a value, and how a split chooses among them."""

import itertools

import pytest

from phalanx.comm.members import Members, by_color

WORLD = Members("world", (0, 1, 2, 3), 2, ("a", "b", "a", "b"))


def test_places_of_this_rank():
    assert (WORLD.size, WORLD.inter_size, WORLD.inter_rank, WORLD.intra_rank) == (4, 2, 0, 1)
    assert WORLD.on_this_host == (0, 2)
    assert WORLD.others == [0, 1, 3]
    assert WORLD.in_world == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_part_keeps_world_ranks_and_hosts():
    part = WORLD.only([3, 2], "part")
    assert part == Members("part", (3, 2), 1, ("b", "a"))
    assert part.only([1], "alone") == Members("alone", (2,), 0, ("a",))
    with pytest.raises(ValueError):  # this rank is not in it
        WORLD.only([0, 1], "others")


def test_colors_partition_the_ranks_in_the_order_of_keys():
    for colors, keys in itertools.product(itertools.product(range(2), repeat=3), itertools.product(range(-1, 2), repeat=3)):
        parts = by_color(list(zip(colors, keys)))
        assert sorted(rank for part in parts.values() for rank in part) == [0, 1, 2]
        for color, part in parts.items():
            assert {colors[rank] for rank in part} == {color}
            assert part == sorted(part, key=lambda rank: (keys[rank], rank))
