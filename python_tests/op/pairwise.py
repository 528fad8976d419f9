"""Rows in which every allowed pair of parameter values occurs, in a fixed order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

Choice: TypeAlias = tuple[str, Any]
Forbidden: TypeAlias = Callable[[Choice, Choice], bool]
Row: TypeAlias = dict[str, Any]


def allowed_pairs(parameters: Mapping[str, Sequence[Any]], forbidden: Forbidden) -> list[tuple[Choice, Choice]]:
    """Every pair of values of two parameters that is not forbidden (in either order)."""
    return [
        ((left, a), (right, b))
        for left, right in combinations(parameters, 2)
        for a in parameters[left]
        for b in parameters[right]
        if not forbidden((left, a), (right, b)) and not forbidden((right, b), (left, a))
    ]


def pairwise(parameters: Mapping[str, Sequence[Any]], forbidden: Forbidden, *, candidates: int = 20) -> list[Row]:
    """Rows that cover all allowed pairs and hold no forbidden one.

    Greedy: each row starts from an uncovered pair and takes, parameter by parameter, the value that covers most; the
    best of `candidates` orders is kept. Raises ValueError for a pair that no row can hold.
    """
    rng = random.Random(0)
    open_pairs = dict.fromkeys(allowed_pairs(parameters, forbidden))
    legal = set(open_pairs)
    rows: list[Row] = []
    while open_pairs:
        seed = next(iter(open_pairs))
        attempts = [_grow(parameters, legal, open_pairs, seed, rng) for _ in range(candidates)]
        complete = [row for row in attempts if row is not None]
        if not complete:
            msg = f"no row can hold {seed}"
            raise ValueError(msg)
        best = max(complete, key=lambda row: len(_pairs(row, parameters) & open_pairs.keys()))
        for pair in _pairs(best, parameters):
            open_pairs.pop(pair, None)
        rows.append(best)
    return rows


def _pairs(row: Row, parameters: Mapping[str, Sequence[Any]]) -> set[tuple[Choice, Choice]]:
    return {((left, row[left]), (right, row[right])) for left, right in combinations(parameters, 2)}


def _grow(
    parameters: Mapping[str, Sequence[Any]],
    legal: set[tuple[Choice, Choice]],
    open_pairs: Mapping[tuple[Choice, Choice], None],
    seed: tuple[Choice, Choice],
    rng: random.Random,
) -> Row | None:
    """One row around a pair, or None where the choices made leave no value for some parameter."""
    rank = {name: i for i, name in enumerate(parameters)}
    row: Row = dict(seed)
    rest = [name for name in parameters if name not in row]
    rng.shuffle(rest)
    for name in rest:
        scored = []
        for value in parameters[name]:
            pairs = [tuple(sorted(((name, value), choice), key=lambda c: rank[c[0]])) for choice in row.items()]
            if all(pair in legal for pair in pairs):
                scored.append((sum(pair in open_pairs for pair in pairs), rng.random(), value))
        if not scored:
            return None
        row[name] = max(scored, key=lambda s: s[:2])[2]
    return {name: row[name] for name in parameters}
