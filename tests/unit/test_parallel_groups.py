"""Groups of ranks of ColossalAI's parallel modes, against its formulas, at up to 512 ranks."""

from __future__ import annotations

import pytest

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.mesh import mesh_order, parallel_groups, rank_groups


def as_set(groups):
    return {tuple(one) for one in groups}


def plain_groups(world, pipeline, tensor):
    """The ranges that ColossalAI's initializers of data, pipeline, model and tensor groups write down."""
    num_data_groups = pipeline * tensor
    return {
        "global": {tuple(range(world))},
        "data": {tuple(range(first, world, num_data_groups)) for first in range(num_data_groups)},
        "pipeline": {
            tuple(range(start + first, start + num_data_groups, tensor))
            for start in range(0, world, num_data_groups)
            for first in range(tensor)
        },
        "model": {tuple(range(start, start + num_data_groups)) for start in range(0, world, num_data_groups)},
        "tensor": {tuple(range(start, start + tensor)) for start in range(0, world, tensor)},
    }


@pytest.mark.parametrize(
    ("pipeline", "tensor", "mode", "depth"),
    [
        (1, 1, None, 1),
        (8, 1, None, 1),
        (4, 8, "1d", 1),
        (2, 16, "sequence", 1),
        (2, 4, "2d", 1),
        (1, 64, "2d", 1),
        (4, 8, "2.5d", 2),
        (1, 64, "2.5d", 4),
        (2, 8, "3d", 1),
        (1, 512, "3d", 1),
        (8, 64, "3d", 1),
    ],
)
def test_512_ranks(pipeline, tensor, mode, depth):
    found = parallel_groups(512, pipeline=pipeline, tensor=tensor, mode=mode, depth=depth)
    for name, expected in plain_groups(512, pipeline, tensor).items():
        assert as_set(found[name]) == expected, name
    for name, groups in found.items():
        assert sorted(rank for group in groups for rank in group) == list(range(512)), name
        assert len({len(group) for group in groups}) == 1, name


def test_rows_and_columns_of_2d():
    q, tensor = 4, 16
    found = parallel_groups(512, tensor=tensor, mode="2d")
    starts = range(0, 512, tensor)
    assert as_set(found["2d_row"]) == {tuple(s + i * q + j for j in range(q)) for s in starts for i in range(q)}
    assert as_set(found["2d_col"]) == {tuple(s + i * q + j for i in range(q)) for s in starts for j in range(q)}


def test_groups_of_2p5d():
    q, depth, tensor = 4, 2, 32
    found = parallel_groups(512, tensor=tensor, mode="2.5d", depth=depth)
    starts, sides, depths = range(0, 512, tensor), range(q), range(depth)
    at = lambda s, d, i, j: s + j + q * (i + q * d)  # noqa: E731
    assert as_set(found["2p5d_row"]) == {
        tuple(at(s, d, i, j) for j in sides) for s in starts for d in depths for i in sides
    }
    assert as_set(found["2p5d_col"]) == {
        tuple(at(s, d, i, j) for i in sides) for s in starts for d in depths for j in sides
    }
    assert as_set(found["2p5d_dep"]) == {
        tuple(at(s, d, i, j) for d in depths) for s in starts for i in sides for j in sides
    }
    assert as_set(found["2p5d_xz"]) == {
        tuple(at(s, d, i, j) for d in depths for j in sides) for s in starts for i in sides
    }


def test_groups_of_3d():
    q, tensor = 4, 64
    found = parallel_groups(512, tensor=tensor, mode="3d", pipeline=2)
    starts, sides = range(0, 512, tensor), range(q)
    at = lambda s, i, j, k: s + i + q * (j + q * k)  # noqa: E731
    assert as_set(found["3d_input"]) == {
        tuple(at(s, i, j, k) for j in sides) for s in starts for i in sides for k in sides
    }
    assert as_set(found["3d_weight"]) == {
        tuple(at(s, i, j, k) for i in sides) for s in starts for j in sides for k in sides
    }
    assert as_set(found["3d_output"]) == {
        tuple(at(s, i, j, k) for k in sides) for s in starts for i in sides for j in sides
    }


def test_the_plugins_mesh_has_these_groups():
    sizes = {"dp": 16, "pp": 4, "sp": 1, "tp": 8}
    ordered = {axis: sizes[axis] for axis in mesh_order(dp_outside=True)}
    found = parallel_groups(512, pipeline=4, tensor=8, mode="1d")
    for name, axis in (("data", "dp"), ("pipeline", "pp"), ("tensor", "tp")):
        assert found[name] == rank_groups(ordered, (axis,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor": 2}, "not a tensor-parallel mode"),
        ({"tensor": 4, "mode": "4d"}, "not a tensor-parallel mode"),
        ({"pipeline": 3}, "does not divide"),
        ({"tensor": 8, "mode": "2d"}, "a square"),
        ({"tensor": 8, "mode": "2.5d", "depth": 4}, "depth times a square"),
        ({"tensor": 16, "mode": "3d"}, "a cube"),
        ({"tensor": 4, "mode": "2d", "depth": 2}, "no effect"),
        ({"pipeline": 0}, "not a count"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parallel_groups(16, **arguments)
