"""Exports episodes as AReaL's per-turn tensors: same keys, dtypes and shapes, one file per episode, with each distinct
image once.

It corrects faults of AReaL's example: faulty episodes are left out and counted, not scored; every sequence has its
entry of images; turns share their episode's reward; sequences too long for a trainer are reported before training."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

import duckdb
import numpy as np

from osworld_pipeline.agent.model_inputs import encode_image
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.datasets.exporters import areal_reader
from osworld_pipeline.datasets.exporters.areal_turns import Turn, split_turns, turn_tensors
from osworld_pipeline.datasets.exporters.folder import export_folder, folder_name, write_manifest
from osworld_pipeline.datasets.exporters.selection import (
    OnProgress,
    Selection,
    count,
    export_views,
    sequences_of,
    steps_of,
    stream,
)
from osworld_pipeline.domain.episode import Outcome, TokenSequence
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, DependencyError
from osworld_pipeline.store import BlobStore

EPISODES_A_BATCH = 16
"""Number of episodes in memory at once, without their images."""
RewardKind = Literal["task", "shaped", "group"]
_COLUMNS = "episode_id, task_id, group_id, checkpoint_id, outcome, task_reward, shaped_reward, processor_digest"
_VALID = tuple(str(outcome) for outcome in Outcome if outcome.is_valid)


@dataclass(frozen=True, kw_only=True)
class ArealExport:
    """Summary of the export."""

    num_episodes: int
    num_turns: int
    num_images: int
    """Distinct images per episode, summed."""
    longest_sequence: int
    """Tokens: AReaL's `max_tokens_per_mb` and `context_length` must be at least this."""
    left_out: dict[str, int]
    """Episodes that were selected and not exported, by reason: an outcome that is not valid, no_tokens, too_long or
    no_spread."""


def export_areal(
    state: StateDir,
    target: Path,
    *,
    processor: Path,
    selection: Selection | None = None,
    reward: RewardKind = "task",
    turn_discount: float = 1.0,
    max_tokens: int | None = None,
    replace: bool = False,
    on_progress: OnProgress | None = None,
) -> ArealExport:
    """Writes the turns into a new folder `target`.

    `selection` is over the `episodes` view. `processor` is the folder of the checkpoint that sampled. `reward` is
    assigned to every turn of an episode: the grader's score, the shaped one, or the grader's score less the mean of its
    group, divided by the group's deviation. Mean and deviation are those of the selected valid episodes; episodes
    without a group, and groups with zero deviation, are left out. Turn t of T gets it times
    `turn_discount` ** (T - 1 - t). An episode with a turn of more than `max_tokens` is left out.

    Raises:
        ValueError: `turn_discount` is not above 0 and at most 1.
        DatasetError: no episode to export, or one whose tokens are of another processor or do not match its images.
        TableError: a table cannot be read, or a filter is bad SQL.
        StoreError: `target` exists, an image or the processor is missing, or the file system refused.
        DependencyError: safetensors is missing.
    """
    if not 0.0 < turn_discount <= 1.0:
        raise ValueError(f"a turn's discount must be more than 0 and at most 1, not {turn_discount}")
    loaded = load_processor(processor)
    query = (selection or Selection()).over(
        "episodes", reward="task_reward", checkpoint="checkpoint_id", purpose="purpose", licence="licence"
    )
    with export_views(state) as connection, export_folder(target, replace=replace) as folder:
        total = count(connection, query, of="episodes")
        rewards = _rewards(connection, query, reward)
        is_multimodal = _has_images(connection, query)
        writer = _Writer(folder, loaded, BlobStore(state.blobs), is_multimodal=is_multimodal, max_tokens=max_tokens)
        (folder / "episodes").mkdir()
        with (folder / "episodes.jsonl").open("w", encoding="utf-8") as index:
            for done, (row, sequences, shas) in enumerate(_episodes(connection, query), start=1):
                written = writer.write(row, sequences, shas, rewards.get(row["episode_id"]), turn_discount)
                if written is not None:
                    index.write(json.dumps(written) + "\n")
                if on_progress is not None:
                    on_progress(done, total)
        result = writer.result()
        if not result.num_episodes:
            why = ", ".join(f"{number} {reason}" for reason, number in result.left_out.items()) or "none is selected"
            raise DatasetError(f"no episode to export ({why}): choose others with --where or --checkpoint")
        shutil.copyfile(areal_reader.__file__, folder / "areal_reader.py")
        settings = {"reward": reward, "turn_discount": turn_discount, "max_tokens": max_tokens}
        content = {"settings": settings, "selection": (selection or Selection()).as_json(), "counts": asdict(result)}
        write_manifest(folder, "areal", content)
    return result


class _Writer:
    def __init__(
        self, folder: Path, processor: Any, blobs: BlobStore, *, is_multimodal: bool, max_tokens: int | None
    ) -> None:
        self._folder, self._processor, self._blobs = folder, processor, blobs
        self._digest = Renderer(processor).processor_digest
        self._is_multimodal, self._max_tokens = is_multimodal, max_tokens
        self._left_out: Counter[str] = Counter()
        self._num_episodes = self._num_turns = self._num_images = self._longest = 0

    def write(
        self,
        row: Mapping[str, Any],
        sequences: Sequence[TokenSequence],
        shas: Sequence[str],
        reward: float | None,
        turn_discount: float,
    ) -> dict[str, Any] | None:
        """The episode's line in the index; None if it is left out, which is counted by reason."""
        reason = _unfit(row, sequences, reward)
        if reason is not None or reward is None:
            self._left_out[reason or "no_reward"] += 1
            return None
        name = f"episode {row['episode_id']}"
        if row["processor_digest"] and row["processor_digest"] != self._digest:
            raise DatasetError(
                f"{name} holds tokens of another processor: set --processor to the folder of the checkpoint that "
                "sampled it, or exclude the episode with --where"
            )
        try:
            turns = split_turns(sequences, image_token_id=self._processor.image_token_id)
            longest = max(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns)
            if self._max_tokens is not None and longest > self._max_tokens:
                self._left_out["too_long"] += 1
                return None
            file = self._write_file(row["episode_id"], turns, shas, reward, turn_discount)
        except (ValueError, IndexError) as error:
            raise DatasetError(f"{name} cannot be split into turns: {error}") from error
        self._num_episodes += 1
        self._num_turns += len(turns)
        self._longest = max(self._longest, longest)
        return {
            "file": file, "episode_id": row["episode_id"], "task_id": row["task_id"], "group_id": row["group_id"],
            "checkpoint_id": row["checkpoint_id"], "outcome": row["outcome"], "task_reward": row["task_reward"],
            "reward": reward, "num_turns": len(turns), "longest_sequence": longest,
        }  # fmt: skip

    def result(self) -> ArealExport:
        return ArealExport(
            num_episodes=self._num_episodes,
            num_turns=self._num_turns,
            num_images=self._num_images,
            longest_sequence=self._longest,
            left_out=dict(sorted(self._left_out.items())),
        )

    def _write_file(
        self, episode_id: str, turns: Sequence[Turn], shas: Sequence[str], reward: float, turn_discount: float
    ) -> str:
        try:
            from safetensors.numpy import save_file
        except ImportError as error:
            raise DependencyError("safetensors is missing: install this project with its extra [train]") from error
        numbers: dict[str, int] = {}
        tensors: dict[str, np.ndarray] = {}
        grids: list[np.ndarray] = []
        for sha256 in dict.fromkeys(shas[step] for turn in turns for step in turn.image_steps):
            pixels, grid = encode_image(self._processor, self._blobs.read(sha256))
            number = numbers[sha256] = len(numbers)
            grids.append(grid)
            tensors |= {f"images/{number}/pixel_values": pixels, f"images/{number}/image_grid_thw": grid[None]}
        images = [[numbers[shas[step]] for step in turn.image_steps] for turn in turns]
        for index, (turn, seen) in enumerate(zip(turns, images, strict=True)):
            share = reward * turn_discount ** (len(turns) - 1 - index)
            made = turn_tensors(
                self._processor, turn, [grids[image] for image in seen], reward=share, is_multimodal=self._is_multimodal
            )
            tensors |= {f"turns/{index}/{key}": value for key, value in made.items()}
        file = f"episodes/{folder_name(episode_id)}.safetensors"
        about = {"images": images, "is_multimodal": self._is_multimodal}
        save_file(
            {key: np.ascontiguousarray(value) for key, value in tensors.items()},
            self._folder / file,
            metadata={"turns": json.dumps(about)},
        )
        self._num_images += len(numbers)
        return file


def _unfit(row: Mapping[str, Any], sequences: Sequence[TokenSequence], reward: float | None) -> str | None:
    if row["outcome"] not in _VALID:
        return str(row["outcome"])
    if not any(any(sequence.response_mask) for sequence in sequences):
        return "no_tokens"
    return "no_spread" if reward is None else None


def _episodes(
    connection: duckdb.DuckDBPyConnection, query: str
) -> Iterator[tuple[dict[str, Any], list[TokenSequence], list[str]]]:
    """Rows, their sequences, and the screenshots of their steps by SHA-256."""
    ordered = f"SELECT {_COLUMNS} FROM ({query}) ORDER BY episode_id"  # noqa: S608 - our own SQL
    for batch in stream(connection, ordered, batch_rows=EPISODES_A_BATCH):
        rows = batch.to_pylist()
        ids = [row["episode_id"] for row in rows]
        steps, sequences = steps_of(connection, ids), sequences_of(connection, ids)
        for row, name in zip(rows, ids, strict=True):
            yield row, sequences[name], [step["screenshot_sha256"] for step in steps[name]]


def _rewards(connection: duckdb.DuckDBPyConnection, query: str, kind: RewardKind) -> dict[str, float]:
    """The rewards of the valid episodes by id."""
    column = "shaped_reward" if kind == "shaped" else "task_reward"
    found = connection.execute(
        f"SELECT episode_id, group_id, {column} FROM ({query}) "  # noqa: S608 - our own SQL
        f"WHERE outcome IN {_VALID} AND {column} IS NOT NULL"
    ).fetchall()
    if kind != "group":
        return {episode_id: reward for episode_id, _, reward in found}
    groups: dict[str, list[float]] = {}
    grouped = [row for row in found if row[1] is not None]
    for _, group_id, reward in grouped:
        groups.setdefault(group_id, []).append(reward)
    rewards: dict[str, float] = {}
    for episode_id, group_id, reward in grouped:
        spread = pstdev(groups[group_id])
        if spread > 0.0:
            rewards[episode_id] = (reward - fmean(groups[group_id])) / spread
    return rewards


def _has_images(connection: duckdb.DuckDBPyConnection, query: str) -> bool:
    shown = f"FROM sequences SEMI JOIN ({query}) USING (episode_id) WHERE len(image_steps) > 0"
    return connection.execute(f"SELECT EXISTS ({shown})").fetchall()[0][0]
