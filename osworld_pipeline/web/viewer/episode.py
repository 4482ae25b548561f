"""The view of one episode: its steps with the marks on their screenshots. It is read from its file, whose name is in
the index."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from osworld_pipeline.agent.observation_text import task_part
from osworld_pipeline.columns import EPISODES, SEQUENCES, STEPS
from osworld_pipeline.dialects.coordinates import CoordinateSpace
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.store.reading import read_rows
from osworld_pipeline.web.viewer.files import HeadFile
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.marks import Drawn, Point, draw_step, find_space, read_action
from osworld_pipeline.web.viewer.settings import NotFoundError

SHA256 = re.compile(r"[0-9a-f]{64}")
_STEP_COLUMNS = tuple(name for name in STEPS.names if name != "observation_text")
_MAPS = frozenset(field.name for field in EPISODES if pa.types.is_map(field.type))


@dataclass(frozen=True, kw_only=True)
class StepView:
    row: Mapping[str, Any]
    """Row of `steps`."""
    drawn: Drawn
    image: str
    """SHA-256 of the screenshot; empty if the step has none."""
    is_image_there: bool

    @property
    def index(self) -> int:
        return self.row["step_index"]

    @property
    def size(self) -> tuple[int, int]:
        return (self.row["screenshot_width"] or 1, self.row["screenshot_height"] or 1)

    @property
    def state(self) -> str:
        """unread, refused, guessed or done."""
        if not self.row["action_parsed"]:
            return "unread"
        if not self.row["action_executed"]:
            return "refused"
        return "guessed" if self.row["fallback_used"] else "done"


@dataclass(frozen=True, kw_only=True)
class EpisodeView:
    row: Mapping[str, Any]
    """Row of `episodes`."""
    instruction: str
    domain: str
    stage: str
    steps: tuple[StepView, ...]
    space: CoordinateSpace
    """Coordinate space of its actions."""

    @property
    def episode_id(self) -> str:
        return self.row["episode_id"]

    @property
    def longest_s(self) -> float:
        """Time of the longest step, model and desktop together."""
        times = [(step.row["model_s"] or 0.0) + (step.row["step_s"] or 0.0) for step in self.steps]
        return max(times, default=0.0)


class Episodes:
    """Reads episodes by id."""

    def __init__(self, state: StateDir, index: EpisodeIndex) -> None:
        self._state, self._index = state, index
        self._blobs = BlobStore(state.blobs)

    def view(self, episode_id: str) -> EpisodeView:
        """
        Raises:
            NotFoundError: the store has no such episode.
            StoreError: its file is damaged.
        """
        head, steps = self._read(episode_id, EPISODES.names), self._read_details(episode_id, "steps", _STEP_COLUMNS)
        row = _plain(head.to_pylist()[0])
        if row["update"] is not None and row["update"] >= 0:
            row["update"] += 1  # the files count from 0
        rows = sorted(steps.to_pylist(), key=lambda step: step["step_index"])
        known = self._known(row)
        first = next((step for step in rows if step["screenshot_width"]), None)
        size = (first["screenshot_width"], first["screenshot_height"] or 1) if first else (1, 1)
        actions = [read_action(step["action"]) for step in rows]
        turns = [(action, step["command"]) for action, step in zip(actions, rows, strict=True)]
        space = row["coordinate_space"] or find_space(turns, size)
        return EpisodeView(
            row=row,
            instruction=self._instruction(episode_id, known),
            domain=known["domain"] or "",
            stage=known["stage"] or "",
            steps=tuple(self._steps(rows, actions, space)),
            space=space,
        )

    def observation(self, episode_id: str, step_index: int) -> str:
        """The observation text that the model read with a screenshot. Raises as `view`."""
        steps = self._read_details(episode_id, "steps", ("step_index", "observation_text"))
        for step in steps.to_pylist():
            if step["step_index"] == step_index:
                return step["observation_text"] or ""
        raise NotFoundError(f"episode {episode_id} has no step {step_index}")

    def tokens(self, episode_id: str) -> tuple[str, list[dict[str, Any]]]:
        """The checkpoint that sampled it, and its rows of `sequences` in order. Raises as `view`."""
        checkpoint_id = self._read(episode_id, ("checkpoint_id",))["checkpoint_id"][0].as_py()
        rows = self._read_details(episode_id, "sequences", SEQUENCES.names).to_pylist()
        return checkpoint_id, sorted(rows, key=lambda row: row["sequence_index"])

    def _read(self, episode_id: str, columns: Sequence[str]) -> pa.Table:
        """One row of `episodes`."""

        def read(file: HeadFile) -> pa.Table:
            return read_rows(file.head, "episodes", "episode_id", [episode_id], columns=columns).slice(0, 1)

        return self._from_file(episode_id, read)

    def _read_details(self, episode_id: str, table: str, columns: Sequence[str]) -> pa.Table:
        """Its rows of `table`, in no order."""
        names = list(dict.fromkeys(("episode_id", *columns)))

        def read(file: HeadFile) -> pa.Table:
            return read_rows(file.details[table], table, "episode_id", [episode_id], columns=names)

        return self._from_file(episode_id, read)

    def _from_file(self, episode_id: str, read: Callable[[HeadFile], pa.Table]) -> pa.Table:
        """Compaction may have removed the file since the last refresh: then the index is refreshed once."""
        for is_last in (False, True):
            with self._index.reading() as reader:
                known = reader.one("SELECT file FROM facts WHERE episode_id = ? LIMIT 1", [episode_id])
            file = self._index.files_of("episodes").files.get(known["file"]) if known else None
            try:
                if file is not None:
                    return read(file)
            except StoreError:
                if is_last:
                    raise
            self._index.refresh(at_once=True)
        raise NotFoundError(
            f"there is no episode '{episode_id}' in {self._state.root}: its part may have been replaced"
        )

    def _known(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Facts from other tables."""
        with self._index.reading() as reader:
            found = reader.one(
                "SELECT f.instruction, f.domain, f.stage, t.is_own FROM facts f "
                "LEFT JOIN union_tasks t ON t.task_id = f.task_id AND t.domain IS NOT DISTINCT FROM f.domain "
                "WHERE f.episode_id = ? LIMIT 1",
                [row["episode_id"]],
            )
        return found or dict.fromkeys(("instruction", "domain", "stage", "is_own"))

    def _instruction(self, episode_id: str, known: Mapping[str, Any]) -> str:
        """The instruction in the table of tasks; for the user's own tasks the one in the model's first prompt, because
        their files may have been changed or removed since."""
        if known["instruction"] and not known["is_own"]:
            return known["instruction"]
        steps = self._read_details(episode_id, "steps", ("step_index", "observation_text")).to_pylist()
        first = next((step["observation_text"] for step in steps if step["step_index"] == 0), None)
        return task_of_prompt(first or "") or known["instruction"] or ""

    def _steps(
        self, rows: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any] | None], space: CoordinateSpace
    ) -> list[StepView]:
        pointer: Point | None = None
        views = []
        for step, action in zip(rows, actions, strict=True):
            size = (step["screenshot_width"] or 1, step["screenshot_height"] or 1)
            drawn = draw_step(action, step["command"], image=size, space=space, pointer=pointer)
            pointer = drawn.pointer
            sha256 = step["screenshot_sha256"] or ""
            is_named = SHA256.fullmatch(sha256) is not None
            views.append(
                StepView(row=step, drawn=drawn, image=sha256 if is_named else "", is_image_there=self._has(sha256))
            )
        return views

    def _has(self, sha256: str) -> bool:
        if not SHA256.fullmatch(sha256):
            return False
        try:
            self._blobs.size(sha256)
        except StoreError:
            return False
        return True


def task_of_prompt(text: str) -> str:
    """The task in the first turn's text; empty if it has none (agent/observation_text.py)."""
    return f"\n{task_part(text)}".partition("\n[Task]\n")[2].strip()


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert maps, which Arrow returns as lists of pairs, to dicts."""
    return {name: dict(value or ()) if name in _MAPS else value for name, value in row.items()}
