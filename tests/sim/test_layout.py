"""Numbering slices: ids, sizes, and what does not fit together."""

import pytest

from moetier.sim.layout import Layout

PARTS = Layout([[4, 2], [6, 3]], n_experts=3)  # two layers, two parts of each expert


def test_a_slice_knows_its_layer_expert_and_part() -> None:
    ids = [(layer, expert, part) for layer in range(2) for expert in range(3) for part in range(2)]

    assert [PARTS.slice_id(*where) for where in ids] == list(range(12))
    assert [(PARTS.layer_of(s), PARTS.expert_of(s), PARTS.part_of(s)) for s in range(12)] == ids


def test_sizes_are_those_of_the_parts() -> None:
    assert PARTS.nbytes == [4, 2, 4, 2, 4, 2, 6, 3, 6, 3, 6, 3]
    assert PARTS.total_bytes == 3 * (4 + 2 + 6 + 3)
    assert PARTS.size([0, 1, 6]) == 12
    assert PARTS.size(()) == 0
    assert PARTS.layer_slices == 6


def test_one_size_is_counted_not_added() -> None:
    same = Layout([[5], [5]], n_experts=2)

    assert same.size({0, 3}) == 10
    assert Layout([[5], [6]], n_experts=2).size([0, 3]) == 11


@pytest.mark.parametrize("parts", [[[1], [1, 2]], [[], []]])
def test_layers_need_the_same_number_of_parts(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every layer needs the same number of parts"):
        Layout(parts, n_experts=2)
