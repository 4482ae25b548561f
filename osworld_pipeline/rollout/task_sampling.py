"""Which task comes next: each in turn, or more often those that teach most just now.

`curriculum` draws a task in proportion to

    max(floor, 1 - |p - target| / max(target, 1 - target)),    p = (successes + 2 target) / (episodes + 2)

over the valid episodes of its last 8 groups: 1 where the success rate is on target, `floor` where it is as far from it
as can be. A task that was never tried has p = target, so it comes as often as the best.
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
from osworld_pipeline.tables.recent_success import RecentEpisodes

RECENT_GROUPS = 8
"""How many of a task's last groups tell how it fares."""
PRIOR_EPISODES = 2.0

ReadRecent = Callable[[int], Mapping[str, RecentEpisodes]]
"""How the tasks fared before an update. Blocks; raises TableError."""


class TaskSampler(Protocol):
    """Depends on the seed and on what `look` saw, on nothing else; so a rerun draws the same tasks."""

    def look(self, update: int) -> None:
        """Turns to what is known before `update`. Blocks: call it in a thread. Raises TableError."""
        ...

    def tasks_of(self, update: int) -> Iterator[Task]:
        """The tasks of an update, and then, without an end, those that may take a place in it: first those that it
        has not."""
        ...

    def task_of(self, serial: int) -> Task:
        """Of the group with this number, where groups are not planned update by update."""
        ...


class RoundRobin:
    """Every task once, in seeded order, before any comes again. The domains are spread evenly over that order, so that
    updates in a row train on nearly the same mixture of them."""

    def __init__(self, tasks: Sequence[Task], *, seed: str, tasks_per_update: int) -> None:
        self._tasks = require_tasks(tasks)
        self._seed = seed
        self._tasks_per_update = tasks_per_update
        # Two rounds: an update may end one and begin the next.
        self._round = lru_cache(maxsize=2)(self._order_of)

    def look(self, update: int) -> None:
        """The order is known beforehand."""

    def tasks_of(self, update: int) -> Iterator[Task]:
        seen: set[str] = set()
        start = update * self._tasks_per_update
        for position in itertools.count(start):
            task = self.task_of(position)
            # Only a task in another's place must not be one that the update has already.
            if position < start + self._tasks_per_update or task.task_id not in seen or len(seen) == len(self._tasks):
                seen.add(task.task_id)
                yield task

    def task_of(self, serial: int) -> Task:
        round_number, index = divmod(serial, len(self._tasks))
        return self._round(round_number)[index]

    def _order_of(self, round_number: int) -> list[Task]:
        return spread_by_domain(self._tasks, random.Random(f"{self._seed}:{round_number}"))


class Curriculum:
    """Drawn in proportion to the weights above, without a task's coming twice in one update where there are others."""

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
    """The formula at the head of this file; `floor` to 1."""
    rate = (recent.num_successes + PRIOR_EPISODES * target) / (recent.num_valid + PRIOR_EPISODES)
    return max(floor, 1.0 - abs(rate - target) / max(target, 1.0 - target))


def open_task_sampler(
    tasks: Sequence[Task], section: RolloutSection, *, seed: str, tasks_per_update: int, read_recent: ReadRecent
) -> TaskSampler:
    """The sampler that the recipe names. Raises TableError where there are no tasks."""
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
    """A random order in which any stretch holds nearly the share of each domain that the whole has: the k-th of a
    domain's n tasks, shuffled, stands at (k + u) / n of the way, u drawn once for the domain."""
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
