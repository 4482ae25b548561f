"""Selects the next task: all tasks in rotation, or more often those from which the policy currently learns most.

`curriculum` draws a task with probability proportional to

    max(floor, 1 - |p - target| / max(target, 1 - target)),    p = (successes + 2 target) / (episodes + 2)

over the valid episodes of its last 8 groups: 1 if the success rate is on target, `floor` if it is as far from it as
possible. A task that was never tried has p = target, so it has the maximum weight.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.replay_strategies import weighted_order
from osworld_pipeline.tables.replay.recent_success import RecentEpisodes

RECENT_GROUPS = 8
"""Number of a task's last groups that determine its success rate."""
PRIOR_EPISODES = 2.0

ReadRecent = Callable[[int], Mapping[str, RecentEpisodes]]
"""Recent episodes by task before an update. Blocks; raises TableError, StoreError."""


class TaskSampler(Protocol):
    """Depends only on the seed and on the data read by `look`, so a rerun draws the same tasks."""

    def look(self, update: int) -> None:
        """Reads the data known before `update`. Blocks: call it in a thread. Raises TableError, StoreError."""
        ...

    def tasks_of(self, update: int) -> Iterator[Task]:
        """The tasks of an update, then an endless sequence of replacements, first those that are not in the update."""
        ...

    def task_of(self, serial: int) -> Task:
        """The task of the group with this number, if groups are not planned per update."""
        ...


class RoundRobin:
    """Every task once, in seeded order, before any repeats. Domains are spread evenly over that order, so that
    successive updates train on nearly the same mixture of them."""

    def __init__(self, tasks: Sequence[Task], *, seed: str, tasks_per_update: int) -> None:
        self._tasks = require_tasks(tasks)
        self._seed = seed
        self._tasks_per_update = tasks_per_update
        # Two rounds: an update may cross from one to the next.
        self._round = lru_cache(maxsize=2)(self._order_of)

    def look(self, update: int) -> None:
        """The order is fixed."""

    def tasks_of(self, update: int) -> Iterator[Task]:
        seen: set[str] = set()
        start = update * self._tasks_per_update
        for position in itertools.count(start):
            task = self.task_of(position)
            # Only replacements are checked against the tasks of the update.
            if position < start + self._tasks_per_update or task.task_id not in seen or len(seen) == len(self._tasks):
                seen.add(task.task_id)
                yield task

    def task_of(self, serial: int) -> Task:
        round_number, index = divmod(serial, len(self._tasks))
        return self._round(round_number)[index]

    def _order_of(self, round_number: int) -> list[Task]:
        return spread_by_domain(self._tasks, random.Random(f"{self._seed}:{round_number}"))


class Curriculum:
    """Draws with the weights above, without repeating a task within an update while others remain."""

    def __init__(
        self, tasks: Sequence[Task], *, seed: str, target: float, floor: float, read_recent: ReadRecent
    ) -> None:
        self._tasks = require_tasks(tasks)
        self._seed = seed
        self._target = target
        self._floor = floor
        self._read_recent = read_recent
        self._recent: Mapping[str, RecentEpisodes] = {}

    def look(self, update: int) -> None:
        self._recent = self._read_recent(update)

    def tasks_of(self, update: int) -> Iterator[Task]:
        weights = self._weights()
        for turn in itertools.count():
            yield from weighted_order(self._tasks, weights, random.Random(f"{self._seed}:{update}:{turn}"))

    def task_of(self, serial: int) -> Task:
        rng = random.Random(f"{self._seed}:serial:{serial}")
        return rng.choices(self._tasks, weights=self._weights())[0]

    def _weights(self) -> list[float]:
        return [
            task_weight(self._recent.get(task.task_id, RecentEpisodes()), target=self._target, floor=self._floor)
            for task in self._tasks
        ]


def task_weight(recent: RecentEpisodes, *, target: float, floor: float) -> float:
    """The formula in the module docstring; `floor` to 1."""
    rate = (recent.num_successes + PRIOR_EPISODES * target) / (recent.num_valid + PRIOR_EPISODES)
    return max(floor, 1.0 - abs(rate - target) / max(target, 1.0 - target))


def open_task_sampler(
    tasks: Sequence[Task], section: RolloutSection, *, seed: str, tasks_per_update: int, read_recent: ReadRecent
) -> TaskSampler:
    """The sampler that the recipe names. Raises TableError if there are no tasks."""
    if section.task_sampling == "round_robin":
        return RoundRobin(tasks, seed=seed, tasks_per_update=tasks_per_update)
    return Curriculum(
        tasks,
        seed=seed,
        target=section.curriculum_target,
        floor=section.curriculum_floor,
        read_recent=read_recent,
    )


def spread_by_domain(tasks: Sequence[Task], rng: random.Random) -> list[Task]:
    """A random order in which every section has nearly the overall share of each domain: the k-th of a domain's n
    shuffled tasks is at (k + u) / n of the order, with u drawn once per domain."""
    domains: dict[str, list[Task]] = {}
    for task in tasks:
        domains.setdefault(task.domain, []).append(task)
    placed: list[tuple[float, Task]] = []
    for members in domains.values():
        rng.shuffle(members)
        offset = rng.random()
        placed += [((index + offset) / len(members), task) for index, task in enumerate(members)]
    return [task for _, task in sorted(placed, key=lambda entry: entry[0])]


def require_tasks(tasks: Sequence[Task]) -> tuple[Task, ...]:
    if not tasks:
        raise TableError("there are no tasks to choose from: materialize train_tasks first")
    return tuple(tasks)
