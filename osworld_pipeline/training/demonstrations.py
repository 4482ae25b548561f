"""Replay rows as SFT trajectories, rendered when their turn comes, so that screenshots stay on disk until then."""

from collections.abc import Callable, Sequence
from typing import overload

from osworld_pipeline.domain.replay import ReplayRow
from osworld_pipeline.domain.trajectory import Trajectory


class DemonstrationSet(Sequence[Trajectory]):
    """The rows that can be trained on, by row id."""

    def __init__(self, rows: Sequence[ReplayRow], render: Callable[[ReplayRow], Trajectory]) -> None:
        """Renders each row once to see whether it can be; `render` raises ValueError where it cannot."""
        self._render = render
        self._rows: list[ReplayRow] = []
        self.skipped: list[str] = []
        """Why rows were left out, one sentence each."""
        for row in sorted(rows, key=lambda row: row.row_id):
            try:
                render(row)
            except ValueError as error:
                self.skipped.append(str(error))
            else:
                self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self._render(row) for row in self._rows[index]]
        return self._render(self._rows[index])
