"""Which demonstrations SFT trains on, and how they become trajectories: each is rendered when its turn comes, so that
screenshots stay on disk until then."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import overload

from osworld_pipeline.domain.replay import ReplayRow, base_task_id
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import SftSection

Example = Sequence[Trajectory]
"""What a batch draws: one demonstration or one episode, as the sequences it consists of."""


def choose_demonstrations(rows: Iterable[tuple[str, str]], settings: SftSection) -> Collection[str]:
    """Of rows as (row id, task id) the ids of those that `settings` lets be trained on. A task keeps its place in the
    seeded order whatever other tasks there are."""
    by_task: dict[str, list[str]] = {}
    for row_id, task_id in rows:
        by_task.setdefault(base_task_id(task_id), []).append(row_id)

    def place(task_id: str) -> str:
        return hashlib.sha256(f"{settings.seed}:{task_id}".encode()).hexdigest()

    num_tasks = max(1, round(settings.task_share * len(by_task)))
    tasks = sorted(by_task, key=place)[:num_tasks]
    return {row_id for task_id in tasks for row_id in sorted(by_task[task_id])[: settings.demonstrations_per_task]}


class LazyExamples(Sequence[Example]):
    """Examples that are made when their turn comes."""

    def __init__(self, makers: Sequence[Callable[[], Example]], row_ids: Sequence[str]) -> None:
        """`row_ids`: the row of `replay` that each example is made of."""
        assert len(makers) == len(row_ids), f"{len(makers)} examples of {len(row_ids)} rows"
        self._makers = makers
        self.row_ids = tuple(row_ids)

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
    """The rows that can be trained on, by row id."""

    def __init__(self, rows: Sequence[ReplayRow], render: Callable[[ReplayRow], Example]) -> None:
        """Renders each row once to see whether it can be; `render` raises ValueError where it cannot."""
        makers: dict[str, Callable[[], Example]] = {}
        self.skipped: list[str] = []
        """Why rows were left out, one sentence each."""
        for row in sorted(rows, key=lambda row: row.row_id):
            try:
                render(row)
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                makers[row.row_id] = partial(render, row)
        super().__init__(list(makers.values()), list(makers))


def join_examples(parts: Sequence[LazyExamples]) -> LazyExamples:
    """One after the other."""
    makers = [partial(part.__getitem__, index) for part in parts for index in range(len(part))]
    return LazyExamples(makers, [row_id for part in parts for row_id in part.row_ids])
