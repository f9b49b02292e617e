"""Rows of values in which any two values of two factors are together."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def covering(factors: Mapping[str, Sequence[Any]], draw: random.Random) -> list[dict[str, Any]]:
    """Return a covering array of strength 2: for any two factors, each pair of their values.

    A row begins with a pair that is missing, and takes for each further factor the value with
    which most pairs are new (Cohen et al., The AETG System, 1997).
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j)): None  # a dict keeps its order
        for a, b in combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        others = [at for at in range(len(names)) if at not in row]
        draw.shuffle(others)
        for at in others:
            news = [
                sum(tuple(sorted(((at, i), taken))) in missing for taken in row.items())
                for i in range(len(factors[names[at]]))
            ]
            row[at] = draw.choice([i for i, new in enumerate(news) if new == max(news)])
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append({name: factors[name][row[at]] for at, name in enumerate(names)})
    return rows
