"""Replay strategies: each assigns a weight to every candidate, and the draw is proportional to the weights.

- `uniform`, `recent_failure`: 1 each.
- `newest`: 2^-r, r = 0 for the newest. Episodes rank before demonstrations, these by quality rank, then by position.
- `shortest`: (fewest steps / own steps)^2, so twice the length is a quarter of the chance.
- `diverse`: 0.05 + d, d = the smallest distance to a candidate that has been injected before, or if none has been,
  the mean distance to the other candidates. The distance of two rows is the Jaccard distance of their sets of
  transitions between successive action types, including begin and end: 0 for equal sets, 1 for disjoint ones.

Under `recent_failure` failed groups are served in an order drawn proportionally to (f + 1) / (n + 2), where f of the
task's last n groups failed; under all others in a random order. The order matters only if injections are limited.
"""

import math
import random
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise
from typing import TypeVar

from osworld_pipeline.tables.replay.candidates import RecentGroups, ReplayCandidate

Item = TypeVar("Item")
DIVERSE_FLOOR = 0.05
"""Keeps a positive weight for rows like an injected one, and for tasks whose rows are all equal."""
_LEAST_RANK_WEIGHT = 2.0**-60
_EDGE = ""
"""The place before the first action and after the last one."""


def row_weights(
    strategy: str, candidates: Sequence[ReplayCandidate], *, injected: Collection[str] = ()
) -> tuple[float, ...]:
    """A positive weight for each candidate; `injected`: ids of rows that joined a group before.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy in ("uniform", "recent_failure"):
        return (1.0,) * len(candidates)
    if strategy == "newest":
        ranks = {row.row_id: rank for rank, row in enumerate(sorted(candidates, key=_age))}
        return tuple(max(2.0 ** -ranks[row.row_id], _LEAST_RANK_WEIGHT) for row in candidates)
    if strategy == "shortest":
        lengths = [max(1, row.num_steps) for row in candidates]
        return tuple((min(lengths) / length) ** 2 for length in lengths)
    if strategy == "diverse":
        return tuple(DIVERSE_FLOOR + novelty for novelty in _novelties(candidates, injected))
    raise ValueError(f"no replay strategy named '{strategy}'")


def failure_priority(recent: RecentGroups) -> float:
    """The probability that the task's next group fails, by Laplace's rule: 1/2 for an unknown task."""
    return (recent.num_failed + 1) / (recent.num_groups + 2)


def weighted_order(items: Sequence[Item], weights: Sequence[float], rng: random.Random) -> list[Item]:
    """All items, drawn without replacement, each time with probabilities proportional to their weights."""
    # Sorting independent exponential times with these rates gives this order.
    times = [-math.log(1.0 - rng.random()) / weight for weight in weights]
    return [items[index] for index in sorted(range(len(items)), key=lambda index: (times[index], index))]


def _novelties(candidates: Sequence[ReplayCandidate], injected: Collection[str]) -> list[float]:
    sets = [_transitions(row.action_types or ()) for row in candidates]
    used = [own for own, row in zip(sets, candidates, strict=True) if row.row_id in injected]
    if used:
        return [min(_distance(own, other) for other in used) for own in sets]
    sums = [0.0] * len(sets)
    for first, second in combinations(range(len(sets)), 2):
        distance = _distance(sets[first], sets[second])
        sums[first] += distance
        sums[second] += distance
    return [total / max(1, len(sets) - 1) for total in sums]


def _transitions(action_types: Sequence[str]) -> frozenset[tuple[str, str]]:
    return frozenset(pairwise((_EDGE, *action_types, _EDGE)))


def _distance(first: frozenset[tuple[str, str]], second: frozenset[tuple[str, str]]) -> float:
    shared = len(first & second)
    return 1.0 - shared / (len(first) + len(second) - shared)


def _age(row: ReplayCandidate) -> tuple[float, float, int, str]:
    recorded_at = -math.inf if row.recorded_at is None else row.recorded_at
    quality = -math.inf if row.quality_rank is None else row.quality_rank
    return -recorded_at, -quality, row.place, row.row_id
