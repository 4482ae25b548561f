"""Plans which demonstrations of the replay buffer are played back: whole ones individually, chunked ones in order of
their chunks, and the reason for each that cannot be played. Rows are streamed; only the actions of their text are
kept."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import OWNED_TABLES, conform
from osworld_pipeline.dialects import Dialect, load_dialect
from osworld_pipeline.dialects.actions import ends_episode, first_point
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import StoreError, TableError, TaskError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.tables.builds import one_build
from osworld_pipeline.tables.owned import read_table, table_path

DEFAULT_DIALECT = "slime"
"""Dialect of rows from before the table had the column `dialect`."""
ROWS_PER_BATCH = 64
_NUMBER = re.compile(r"\d+$")
_COLUMNS = (
    *("row_id", "task_id", "original_task_id", "source_dataset", "source_path", "source_line", "reward"),
    *("dialect", "messages", "images"),
)

NO_TASK = "its task is not a training task: it has no config that can be run"
NOT_CLAIMED = "its recorded reward is missing or below the threshold of a success"
INCOMPLETE = "a chunk of a demonstration with missing or repeated chunks"
ENDS_OPEN = "a chunk of a demonstration whose last chunk does not end the episode"


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """One action to execute."""

    dialect: str
    arguments: Mapping[str, Any]
    """Arguments in normal form, with points as the model wrote them."""
    image_size: tuple[int, int] | None = None
    """(width, height) of the image that its points refer to in pixels; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class Playback:
    """One demonstration to execute; all rows of a chunked one."""

    row_ids: tuple[str, ...]
    task_id: str
    source: str
    """Its location: source, file and line (of the first chunk)."""
    turns: tuple[PlayedTurn, ...]

    @property
    def key(self) -> str:
        return digest_json(list(self.row_ids))


@dataclass(frozen=True, kw_only=True)
class PlaybackPlan:
    playbacks: tuple[Playback, ...]
    """The playbacks in playback order: one demonstration of each task first, then the second ones; deterministic."""
    tasks: Mapping[str, Task]
    unplayable: Mapping[str, tuple[str, ...]]
    """Row ids by the reason why they cannot be verified; this is an outcome, not a failure."""

    @property
    def num_unplayable(self) -> int:
        return sum(len(rows) for rows in self.unplayable.values())


@dataclass(frozen=True, kw_only=True)
class _Row:
    row_id: str
    task_id: str
    original_task_id: str
    source: tuple[str, str]
    """Source and file."""
    line: int
    turns: tuple[PlayedTurn, ...]

    @property
    def chunk(self) -> int | None:
        """The number of the chunk; None for a whole demonstration."""
        if base_task_id(self.original_task_id) == self.original_task_id:
            return None
        number = _NUMBER.search(self.original_task_id)
        return int(number[0]) if number else None

    @property
    def ends_episode(self) -> bool:
        return bool(self.turns) and ends_episode(self.turns[-1].arguments)


class _Unplayable(Exception):
    """The reason why a row cannot be played; recorded in the plan."""


def plan_playbacks(state: StateDir, *, min_reward: float) -> PlaybackPlan:
    """Plans every demonstration that claims a reward of at least `min_reward` and whose task can be run.

    Raises:
        TableError: a table's file is damaged.
    """
    unplayable: dict[str, list[str]] = defaultdict(list)
    whole: list[_Row] = []
    chunks: dict[str, list[_Row]] = defaultdict(list)
    blobs = BlobStore(state.blobs)
    with one_build(state):
        tasks = _training_tasks(state)
        for record in _replay_records(state):
            try:
                row = _read_row(record, tasks, blobs, min_reward)
            except _Unplayable as reason:
                unplayable[str(reason)].append(record["row_id"])
                continue
            if row.chunk is None:
                whole.append(row)
            else:
                chunks[row.task_id].append(row)
    playbacks = [_playback([row]) for row in whole]
    for rows in chunks.values():
        for members in _join_chunks(rows, unplayable):
            playbacks.append(_playback(members))
    return PlaybackPlan(
        playbacks=tuple(_task_by_task(playbacks)),
        tasks=tasks,
        unplayable={reason: tuple(rows) for reason, rows in sorted(unplayable.items())},
    )


def chosen_playbacks(plan: PlaybackPlan, recipe: Recipe) -> tuple[Playback, ...]:
    """The playbacks that the recipe selects for verification."""
    limit = {"none": 0, "sample": recipe.replay.verification_sample, "all": None}[recipe.replay.verify]
    return plan.playbacks[:limit]


def _training_tasks(state: StateDir) -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for row in read_table(state, "train_tasks").select(["task_id", "task_config", "domain"]).to_pylist():
        try:
            tasks[row["task_id"]] = Task.from_config(orjson.loads(row["task_config"]), domain=row["domain"])
        except (TaskError, orjson.JSONDecodeError):
            continue
    return tasks


def _replay_records(state: StateDir) -> Iterator[dict[str, Any]]:
    path = table_path(state, "replay_buffer")
    schema = pa.schema([OWNED_TABLES["replay_buffer"].field(name) for name in _COLUMNS])
    if not path.is_file():
        return
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
                yield from conform(pa.Table.from_batches([batch]), schema).to_pylist()
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged ({error}): remove it and materialize replay_buffer again") from error


def _read_row(record: Mapping[str, Any], tasks: Mapping[str, Task], blobs: BlobStore, min_reward: float) -> _Row:
    if record["task_id"] not in tasks:
        raise _Unplayable(NO_TASK)
    if record["reward"] is None or record["reward"] < min_reward:
        raise _Unplayable(NOT_CLAIMED)
    name = record["dialect"] or DEFAULT_DIALECT
    try:
        dialect = load_dialect(name)
    except ValueError as error:
        raise _Unplayable(str(error)) from error
    return _Row(
        row_id=record["row_id"],
        task_id=record["task_id"],
        original_task_id=record["original_task_id"],
        source=(record["source_dataset"], record["source_path"]),
        line=record["source_line"] or 0,
        turns=tuple(_turns(record["messages"], record["images"] or (), dialect, blobs)),
    )


def _turns(
    messages: Sequence[Mapping[str, Any]], images: Sequence[str], dialect: Dialect, blobs: BlobStore
) -> Iterator[PlayedTurn]:
    num_images = turn_no = 0
    for message in messages:
        num_images += sum(part["type"] == "image" for part in message["content"])
        if message["role"] != "assistant":
            continue
        turn_no += 1
        turn = dialect.parse("".join(part["text"] or "" for part in message["content"] if part["type"] == "text"))
        if turn.arguments is None:
            raise _Unplayable(f"a turn cannot be read in the dialect {dialect.name}")
        size = None
        if first_point(turn.arguments) is not None and dialect.coordinate_space == "model_pixels":
            if not 0 < num_images <= len(images):
                raise _Unplayable("it refers to an image that it does not have")
            size = _image_size(blobs, images[num_images - 1])
        yield PlayedTurn(dialect=dialect.name, arguments=turn.arguments, image_size=size)


def _image_size(blobs: BlobStore, sha256: str) -> tuple[int, int]:
    try:
        with open_picture(blobs.read(sha256)) as image:
            return image.size
    except (StoreError, *NO_PICTURE) as error:
        raise _Unplayable("it refers to an image that is missing from the store or damaged") from error


def _join_chunks(rows: Sequence[_Row], unplayable: dict[str, list[str]]) -> Iterator[list[_Row]]:
    """The complete demonstrations of one task: chunks 0 to n that follow each other in one file, and then one of all
    other rows of the task if they have each number from 0 exactly once (after deduplication the rest of a demonstration
    may be in another file)."""
    left: list[_Row] = []
    by_file: dict[tuple[str, str], list[_Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.source, row.line, row.row_id)):
        by_file[row.source].append(row)
    for members in by_file.values():
        for run in _runs(members):
            if run[0].chunk == 0 and run[-1].ends_episode:
                yield run
            else:
                left += run
    ordered = sorted(left, key=lambda row: row.chunk or 0)
    if [row.chunk for row in ordered] != list(range(len(ordered))):
        unplayable[INCOMPLETE] += [row.row_id for row in left]
    elif left and not ordered[-1].ends_episode:
        unplayable[ENDS_OPEN] += [row.row_id for row in left]
    elif left:
        yield ordered


def _runs(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Splits where the next chunk's number does not follow."""
    run: list[_Row] = []
    for row in rows:
        if run and row.chunk != (run[-1].chunk or 0) + 1:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _playback(rows: Sequence[_Row]) -> Playback:
    return Playback(
        row_ids=tuple(row.row_id for row in rows),
        task_id=rows[0].task_id,
        source=f"{rows[0].source[0]}: {rows[0].source[1]}:{rows[0].line}",
        turns=tuple(turn for row in rows for turn in row.turns),
    )


def _task_by_task(playbacks: Sequence[Playback]) -> list[Playback]:
    rank: Counter[str] = Counter()
    ranked = []
    for playback in sorted(playbacks, key=lambda playback: playback.key):
        ranked.append((rank[playback.task_id], playback))
        rank[playback.task_id] += 1
    return [playback for _, playback in sorted(ranked, key=lambda pair: pair[0])]
