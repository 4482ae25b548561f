"""Selects the demonstrations for SFT and converts them to trajectories. Each is rendered on use, so that screenshots
stay on disk until then."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import overload

from osworld_pipeline.domain.replay import ReplayRow, TrainedRow, base_task_id
from osworld_pipeline.domain.task import family_of_task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import SftSection

Example = Sequence[Trajectory]
"""The unit of a batch: one demonstration or one episode, as its sequences."""


def choose_demonstrations(
    rows: Iterable[tuple[str, str]], settings: SftSection, *, domains: Mapping[str, str]
) -> Collection[str]:
    """The ids of the rows that `settings` selects; `rows` are (row id, task id). `domains` of tasks, by base id;
    missing ones count as one domain. The seeded order of two tasks of a family does not depend on other tasks."""
    by_task: dict[str, list[str]] = {}
    for row_id, task_id in rows:
        by_task.setdefault(base_task_id(task_id), []).append(row_id)
    num_tasks = max(1, round(settings.task_share * len(by_task)))
    tasks = _evenly_over_families(by_task, settings.seed, domains)[:num_tasks]
    return {row_id for task_id in tasks for row_id in sorted(by_task[task_id])[: settings.demonstrations_per_task]}


def _evenly_over_families(task_ids: Iterable[str], seed: int, domains: Mapping[str, str]) -> list[str]:
    """The tasks in a seeded order; every prefix has the same share of each family, up to one task."""

    def draw(name: str) -> str:
        return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()

    families: dict[str, list[str]] = {}
    for task_id in sorted(task_ids, key=draw):
        families.setdefault(family_of_task(task_id, domains.get(task_id, "")), []).append(task_id)
    share_before = {
        task_id: (place + 0.5) / len(family) for family in families.values() for place, task_id in enumerate(family)
    }
    return sorted(share_before, key=lambda task_id: (share_before[task_id], draw(task_id)))


class LazyExamples(Sequence[Example]):
    """Examples that are rendered on use."""

    def __init__(self, makers: Sequence[Callable[[], Example]], rows: Sequence[TrainedRow]) -> None:
        """`rows`: the row of `replay` for each example."""
        assert len(makers) == len(rows), f"{len(makers)} examples of {len(rows)} rows"
        self._makers = makers
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [make() for make in self._makers[index]]
        return self._makers[index]()


class DemonstrationSet(LazyExamples):
    """The trainable rows, by row id."""

    def __init__(self, rows: Sequence[ReplayRow], render: Callable[[ReplayRow], Example]) -> None:
        """Renders each row once to check it; `render` raises ValueError if that fails."""
        makers: list[Callable[[], Example]] = []
        made_of: list[TrainedRow] = []
        self.skipped: list[str] = []
        """Why rows were omitted, one sentence each."""
        for row in sorted(rows, key=lambda row: row.row_id):
            try:
                render(row)
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                makers.append(partial(render, row))
                made_of.append(TrainedRow.of(row))
        super().__init__(makers, made_of)


def join_examples(parts: Sequence[LazyExamples]) -> LazyExamples:
    """Concatenates them."""
    makers = [partial(part.__getitem__, index) for part in parts for index in range(len(part))]
    return LazyExamples(makers, [row for part in parts for row in part.rows])
