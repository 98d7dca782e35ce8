"""Integer program of choices: one per node, with costs of nodes and of edges, and a budget of memory.

Note [Integer program]
Node v takes one of its choices s, at a cost c_v(s) and with a memory m_v(s). Edge (u, v) costs e(s, t), infinite where
the choices s of u and t of v exclude each other. With x_v(s) in {0, 1} and sum_s x_v(s) = 1, an edge of finite costs is
linearised by y(s, t) >= 0 with sum_t y(s, t) = x_u(s) and sum_s y(s, t) = x_v(t), which makes y the product (Zheng et
al., "Alpa", 2022). Without costs it only excludes: x_u(s) <= the sum of x_v(t) over the t that fit, and vice versa.
Before the solver sees the program, it is made smaller, without a change of its optimum:

- A choice that no choice of a neighbor fits to is removed, until nothing changes.
- Nodes on an edge that fits each choice to exactly one choice of the other are merged into one.

Most tensors have one producer and operators that take them as they are, so that a layer becomes a few nodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from booster.errors import ConfigError

Matrix = NDArray[np.float64]
_Row = tuple[dict[int, float], float, float]  # of a sparse matrix of constraints: coefficients by column, and bounds


@dataclass(frozen=True, slots=True)
class Solution:
    """Optimal choice of each node, and the sums of their costs and of their memory."""

    choices: tuple[int, ...]
    cost: float
    memory: float


@dataclass(slots=True)
class _State:
    """A choice of a merged node: those of the nodes in it."""

    cost: float
    memory: float
    choices: tuple[tuple[int, int], ...]


class IntegerProgram:
    """Nodes with choices, and edges between them; see Note [Integer program]."""

    def __init__(self) -> None:
        self._states: dict[int, list[_State]] = {}
        self._edges: dict[tuple[int, int], Matrix] = {}
        self._num_nodes = 0

    def add_node(self, costs: Iterable[float], memory: Iterable[float] | None = None) -> int:
        """Add a node with the cost and the memory of each choice, and return its index."""
        given, node = list(costs), self._num_nodes
        held = [0.0] * len(given) if memory is None else list(memory)
        self._states[node] = [
            _State(float(cost), float(own), ((node, index),))
            for index, (cost, own) in enumerate(zip(given, held, strict=True))
        ]
        self._num_nodes += 1
        return node

    def add_edge(self, source: int, target: int, costs: Any) -> None:
        """Add an edge between two nodes with the cost of each pair of choices; `math.inf` excludes a pair."""
        matrix = np.asarray(costs, dtype=np.float64)
        if source > target:
            source, target, matrix = target, source, matrix.T
        before = self._edges.get((source, target))
        self._edges[source, target] = matrix.copy() if before is None else before + matrix

    def reduce(self) -> bool:
        """Make the program smaller, with the same optimum; return False, without a change, if no choices fit."""
        kept = {node: np.ones(len(one), dtype=bool) for node, one in self._states.items()}
        if not _remove_excluded(kept, self._edges):
            return False
        for node, one in self._states.items():
            self._states[node] = [state for state, is_kept in zip(one, kept[node], strict=True) if is_kept]
        self._edges = {(u, v): matrix[np.ix_(kept[u], kept[v])] for (u, v), matrix in self._edges.items()}
        _merge(self._states, self._edges)
        return True

    def solve(
        self, *, memory_budget: float | None = None, allowed: Mapping[int, Iterable[int]] | None = None
    ) -> Solution | None:
        """Return the choices of the least cost among those allowed, within a budget, or None if there are none.

        Raises:
            ConfigError: scipy is not installed.
        """
        given = {node: frozenset(one) for node, one in (allowed or {}).items()}
        forbidden = {
            (node, index)
            for node, one in self._states.items()
            for index, state in enumerate(one)
            if any(key in given and choice not in given[key] for key, choice in state.choices)
        }
        chosen = _optimize(self._states, self._edges, memory_budget, forbidden)
        if chosen is None:
            return None
        taken = [self._states[node][state] for node, state in chosen.items()]
        choices = dict(pair for one in taken for pair in one.choices)
        cost = sum(one.cost for one in taken)
        cost += sum(float(matrix[chosen[u], chosen[v]]) for (u, v), matrix in self._edges.items())
        return Solution(tuple(choices[node] for node in range(self._num_nodes)), cost, sum(one.memory for one in taken))

    def least_memory(self, allowed: Mapping[int, Iterable[int]] | None = None) -> float:
        """Return the memory of the allowed choices that need the least.

        Raises:
            ConfigError: scipy is not installed.
        """
        costs_memory = copy.copy(self)
        costs_memory._states = {
            node: [replace(state, cost=state.memory) for state in one] for node, one in self._states.items()
        }
        costs_memory._edges = {key: np.where(np.isinf(one), math.inf, 0.0) for key, one in self._edges.items()}
        found = costs_memory.solve(allowed=allowed)
        return math.inf if found is None else found.memory


def _remove_excluded(kept: dict[int, NDArray[np.bool_]], edges: Mapping[tuple[int, int], Matrix]) -> bool:
    """Remove choices that no neighbor's choice fits to. Return False if a node has none left."""
    fits = {key: np.isfinite(matrix) for key, matrix in edges.items()}
    of_node: dict[int, list[tuple[int, int]]] = {}
    for u, v in edges:
        of_node.setdefault(u, []).append((u, v))
        of_node.setdefault(v, []).append((u, v))
    queue = set(edges)
    while queue:
        u, v = queue.pop()
        matrix = fits[u, v]
        left = kept[u] & (matrix[:, kept[v]].any(axis=1))
        right = kept[v] & (matrix[left].any(axis=0))
        for node, now in ((u, left), (v, right)):
            if now.sum() < kept[node].sum():
                kept[node] = now
                queue.update(of_node[node])
    return all(one.any() for one in kept.values())


def _merge(states: dict[int, list[_State]], edges: dict[tuple[int, int], Matrix]) -> None:
    """Merge nodes on edges that fit each choice to exactly one of the other, in place."""
    neighbors: dict[int, set[int]] = {node: set() for node in states}
    for u, v in edges:
        neighbors[u].add(v)
        neighbors[v].add(u)
    queue = list(edges)
    while queue:
        key = queue.pop()
        if key not in edges:
            continue
        matrix = edges[key]
        fits = np.isfinite(matrix)
        is_one_to_one = matrix.shape[0] == matrix.shape[1] and bool(
            (fits.sum(0) == 1).all() and (fits.sum(1) == 1).all()
        )
        if not is_one_to_one:
            continue
        u, v = key
        order = fits.argmax(axis=1)  # the choice of v that fits to each of u
        del edges[key]
        neighbors[u].discard(v)
        neighbors[v].discard(u)
        states[u] = [
            _State(
                one.cost + other.cost + float(matrix[index, order[index]]),
                one.memory + other.memory,
                one.choices + other.choices,
            )
            for index, (one, other) in enumerate(zip(states[u], (states[v][i] for i in order), strict=True))
        ]
        del states[v]
        for other in neighbors.pop(v):
            moved = edges.pop((v, other)) if (v, other) in edges else edges.pop((other, v)).T
            moved = moved[order]
            new = (u, other)
            if u > other:
                new, moved = (other, u), moved.T
            edges[new] = edges[new] + moved if new in edges else moved
            neighbors[other].discard(v)
            neighbors[other].add(u)
            neighbors[u].add(other)
            queue.append(new)


def _optimize(
    states: Mapping[int, list[_State]],
    edges: Mapping[tuple[int, int], Matrix],
    memory_budget: float | None,
    forbidden: Collection[tuple[int, int]],
) -> dict[int, int] | None:
    """Return the choice of each merged node by HiGHS (Huangfu and Hall, 2018), or None if there is none."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ConfigError(
            "the solver of placements needs scipy, which is not installed: pip install 'torch-booster[auto]'"
        ) from error
    first: dict[int, int] = {}
    costs: list[float] = []
    for node, one in states.items():
        first[node] = len(costs)
        costs.extend(state.cost for state in one)
    num_choices = len(costs)
    rows: list[_Row] = [({first[node] + i: 1.0 for i in range(len(one))}, 1.0, 1.0) for node, one in states.items()]
    for (u, v), matrix in edges.items():
        _add_edge(rows, costs, matrix, first[u], first[v])
    memories = {first[node] + i: state.memory for node, one in states.items() for i, state in enumerate(one)}
    unit = max(map(abs, memories.values()), default=0.0) or 1.0
    if memory_budget is not None:
        used = {key: value / unit for key, value in memories.items() if value}
        rows.append((used, -math.inf, memory_budget / unit))
    scale = max(map(abs, costs), default=0.0) or 1.0  # seconds and bytes are far from the solver's tolerances
    integrality = np.zeros(len(costs))
    integrality[:num_choices] = 1
    most = np.ones(len(costs))
    most[[first[node] + index for node, index in forbidden]] = 0
    entries = [(row, column, value) for row, (one, _, _) in enumerate(rows) for column, value in one.items()]
    row_indices, columns, values = zip(*entries, strict=True)
    matrix = sparse.csr_array((values, (row_indices, columns)), shape=(len(rows), len(costs)))
    low, high = [one[1] for one in rows], [one[2] for one in rows]
    found = optimize.milp(
        np.array(costs) / scale,
        integrality=integrality,
        bounds=optimize.Bounds(0, most),
        constraints=optimize.LinearConstraint(matrix, low, high),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return {node: int(np.argmax(found.x[first[node] : first[node] + len(one)])) for node, one in states.items()}


def _add_edge(rows: list[_Row], costs: list[float], matrix: Matrix, u: int, v: int) -> None:
    """Add an edge's constraints, and the products of choices as variables if it has costs."""
    fits = np.isfinite(matrix)
    if not matrix[fits].any():
        for side, other, pairs in ((u, v, fits), (v, u, fits.T)):
            for index, fitting in enumerate(pairs):
                others = {other + int(j): -1.0 for j in np.flatnonzero(fitting)}
                rows.append(({side + index: 1.0, **others}, -math.inf, 0.0))
        return
    products = np.zeros(matrix.shape, dtype=int)
    products[fits] = range(len(costs), len(costs) + int(fits.sum()))
    costs += matrix[fits].tolist()
    for side, pairs, columns in ((u, fits, products), (v, fits.T, products.T)):
        for index, fitting in enumerate(pairs):
            own = dict.fromkeys(columns[index][fitting].tolist(), 1.0)
            rows.append(({**own, side + index: -1.0}, 0.0, 0.0))
