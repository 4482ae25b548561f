"""The trajectory store: finished episodes and groups as Parquet parts, screenshots as blobs; many writers, no lock.

A part is several files of one name, and the head's rename commits them all: `episodes/` with `steps/` and
`sequences/`, and `rollout_groups/` with `injections/`. Files do not change: a rewritten part is a new file, and the
newest is live (see part_files.py). So a reader sees the new part, the previous one, or none.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from osworld_pipeline.atomic_io import remove_stale_temps, write_parquet
from osworld_pipeline.columns import (
    BOOKKEEPING,
    Row,
    attempt_row,
    episode_from,
    episode_row,
    group_row,
    injection_row,
    marked,
    sequence_rows,
    step_rows,
    stored,
    update_row,
    verification_row,
)
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayVerification
from osworld_pipeline.domain.stage_record import StageAttempt, UpdateRecord
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.store.merging import MERGE_PARTS, GroupCommit, PartMerger
from osworld_pipeline.store.old_tokens import need_sequences
from osworld_pipeline.store.part_files import (
    COMPACTED,
    DETAILS_OF,
    HEAD_OF,
    INCOMING,
    KEY_OF,
    PartFile,
    begin_format,
    take_snapshot,
)
from osworld_pipeline.store.reading import read_part_table, read_rows, row_groups_from
from osworld_pipeline.store.versions import next_version

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}")


class TrajectoryStore:
    """Implements protocols.EpisodeSink over a state folder."""

    def __init__(self, state: StateDir, *, merge_parts: int = MERGE_PARTS) -> None:
        """`merge_parts`: number of small parts of a table that triggers a merge while this writer runs."""
        self.root = state.trajectories
        self._merger = PartMerger(self.root, merge_parts=merge_parts)
        self._group = GroupCommit(self.root, "episodes")
        self.blobs = BlobStore(state.blobs)
        # The first list makes Arrow import pandas: do that now, not during the first append.
        pa.array([0])
        self.blobs.remove_stale_temps()
        remove_stale_temps(self.root / INCOMING)
        need_sequences(self.root)
        self._has_note = False

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        """Stores an image once; returns its SHA-256. Raises StoreError."""
        return self.blobs.write(data, suffix=suffix)

    def read_blob(self, sha256: str) -> bytes:
        """Raises StoreError if there is no such image."""
        return self.blobs.read(sha256)

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None:
        """One atomic part of `episodes`, `steps` and `sequences`; a part of that name is replaced.

        Raises:
            StoreError: a bad part name, the same episode twice, or the file system refused.
        """
        _need_distinct(part, "episode", [episode.episode_id for episode in episodes])
        self._write_part("episodes", part, _rows_of(episodes))

    def write_new_parts(self, parts: Mapping[str, Sequence[Episode]]) -> None:
        """Does the same as write_episodes of each of `parts`, but in one commit if all of them are new (`GroupCommit`):
        much faster for many parts of few episodes. No two parts may have the same episode. After an error some parts
        may be written."""
        if len(parts) > 1 and self._commit_together(parts):
            return
        for part, episodes in parts.items():
            self.write_episodes(part, episodes)

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None:
        """One atomic part of `rollout_groups` and `injections`; a part of that name is replaced. Raises StoreError."""
        _need_distinct(part, "group", [group.group_id for group in groups])
        _need_distinct(part, "injection", [injection.injection_id for injection in injections])
        by_id = {group.group_id: group for group in groups}
        rows = [injection_row(injection, by_id.get(injection.group_id)) for injection in injections]
        tables = {"rollout_groups": [group_row(group) for group in groups], "injections": rows}
        self._write_part("rollout_groups", part, tables)

    def read_group_rows(self, part: str) -> list[Row]:
        """The rows of `rollout_groups` of a part; none if there is no such part. Raises StoreError."""
        head, files = "rollout_groups", take_snapshot(self.root, "rollout_groups")
        small = [self.root / head / file.name for file in files.small if file.part == part]
        compacted = [] if small else [self.root / head / COMPACTED / name for name in files.compacted]
        tables = [read_part_table(path, head) for path in small]
        tables += [read_rows(path, head, "part", [part]) for path in compacted]
        return [row for table in tables for row in table.drop_columns(BOOKKEEPING.names).to_pylist()]

    def write_group_rows(self, part: str, rows: Sequence[Row]) -> None:
        """Does the same as write_groups, for rows of `rollout_groups` as they were read. Raises StoreError."""
        self._write_part("rollout_groups", part, {"rollout_groups": list(rows), "injections": []})

    def write_verifications(self, part: str, verifications: Sequence[ReplayVerification]) -> None:
        """One atomic part of `replay_verifications`; a part of that name is replaced. Raises StoreError."""
        _need_distinct(part, "verification", [verification.verification_id for verification in verifications])
        rows = [verification_row(verification) for verification in verifications]
        self._write_part("replay_verifications", part, {"replay_verifications": rows})

    def write_updates(self, part: str, updates: Sequence[UpdateRecord]) -> None:
        """One atomic part of `updates`; a part of that name is replaced. Raises StoreError."""
        self._write_part("updates", part, {"updates": [update_row(update) for update in updates]})

    def write_attempt(self, attempt: StageAttempt) -> None:
        """Writes this attempt as its own part of `stage_attempts`; replaces the earlier part of the same attempt.
        Raises StoreError."""
        self._write_part("stage_attempts", attempt.attempt_id, {"stage_attempts": [attempt_row(attempt)]})

    def existing_parts(self, table: str = "episodes", prefix: str = "") -> list[str]:
        """Names of the committed parts of a table; the details of a head table have its parts."""
        head = HEAD_OF.get(table, table)
        files = take_snapshot(self.root, head)
        parts = set(files.rewritten)
        for name in files.compacted:
            path = self.root / head / COMPACTED / name
            groups = row_groups_from(path, "part", prefix)
            found = read_part_table(path, head, columns=["part"], row_groups=groups)
            parts.update(found["part"].unique().to_pylist())
        return sorted(part for part in parts if part.startswith(prefix))

    def read_episodes(self, part: str) -> tuple[Episode, ...]:
        """The episodes of a part, as they were written.

        Raises:
            StoreError: there is no such part, or a file is damaged.
        """
        found = self.read_parts([part])
        if part not in found:
            raise StoreError(f"there is no part '{part}' of episodes in {self.root}")
        return found[part]

    def read_parts(self, parts: Collection[str]) -> dict[str, tuple[Episode, ...]]:
        """The episodes of those of `parts` that exist, by part; faster than separate reads. Raises StoreError."""
        wanted = set(parts)
        files = take_snapshot(self.root, "episodes")
        found: dict[str, tuple[Episode, ...]] = {}
        for file in files.small:
            if file.part in wanted:
                head = read_part_table(self.root / "episodes" / file.name, "episodes")
                found[file.part] = _episodes(head, self._details(file))
        missing = wanted - found.keys()
        for name in files.compacted if missing else ():
            for part, episodes in self._compacted_episodes(name, "part", missing):
                found[part] = (*found.get(part, ()), *episodes)
        return found

    def find_episode(self, episode_id: str) -> Episode:
        """The episode of that id, as it was written.

        Raises:
            StoreError: there is none.
        """
        files = take_snapshot(self.root, "episodes")
        for name in files.compacted:
            for part, episodes in self._compacted_episodes(name, "episode_id", [episode_id]):
                if part not in files.rewritten:
                    return episodes[0]
        # An episode's part is usually named after it, or after a prefix of its id.
        for file in sorted(files.small, key=lambda file: not episode_id.startswith(file.part)):
            head = read_rows(self.root / "episodes" / file.name, "episodes", "episode_id", [episode_id])
            if head.num_rows:
                return _episodes(head, self._details_of(file.name, [episode_id]))[0]
        raise StoreError(
            f"there is no episode '{episode_id}' in {self.root}: it was not stored, or its part was replaced"
        )

    def _details(self, file: PartFile) -> dict[str, pa.Table]:
        """The details of a small part, by table."""
        return {table: read_part_table(self.root / table / file.name, table) for table in DETAILS_OF["episodes"]}

    def _details_of(self, name: str, episode_ids: Collection[str]) -> dict[str, pa.Table]:
        """The details of some episodes of a file, by table. `name`: below the folder of its table."""
        return {
            table: read_rows(self.root / table / name, table, "episode_id", episode_ids)
            for table in DETAILS_OF["episodes"]
        }

    def _compacted_episodes(
        self, name: str, column: str, values: Collection[str]
    ) -> Iterator[tuple[str, tuple[Episode, ...]]]:
        """The episodes of a compacted file whose `column` is one of `values`, by part."""
        head = read_rows(self.root / "episodes" / COMPACTED / name, "episodes", column, values)
        if head.num_rows == 0:
            return
        ids = head["episode_id"].to_pylist()
        order = head.column("part").to_pylist()
        by_part: dict[str, list[Episode]] = {}
        for part, episode in zip(order, _episodes(head, self._details_of(f"{COMPACTED}/{name}", ids)), strict=True):
            by_part.setdefault(part, []).append(episode)
        yield from ((part, tuple(episodes)) for part, episodes in by_part.items())

    def _write_part(self, head: str, part: str, rows: Mapping[str, list[Row]]) -> None:
        """`rows`: by table, those of `head` and of each of its details."""
        version = self._next_version(head, [part])
        tables = _tables(head, {part: rows}, version)
        name = f"{part}~{version:016x}-{secrets.token_hex(3)}.parquet"
        # The head last: its rename is the commit.
        for table in (*DETAILS_OF[head], head):
            # A query reads the footer of every small part, so it has statistics of the id only, not of all 40 columns.
            path, ids = self.root / table / name, (KEY_OF[head],)
            write_parquet(path, marked(tables[table]), temp_folder=self.root / INCOMING, statistics=ids)
        self._merger.written(head)

    def _commit_together(self, parts: Mapping[str, Sequence[Episode]]) -> bool:
        _need_distinct(None, "episode", [one.episode_id for episodes in parts.values() for one in episodes])
        version = self._next_version("episodes", parts)
        tables = _tables("episodes", {part: _rows_of(episodes) for part, episodes in parts.items()}, version)
        is_committed = self._group.commit(parts.keys(), tables)
        if is_committed:
            self._merger.committed("episodes")
        return is_committed

    def _next_version(self, head: str, parts: Iterable[str]) -> int:
        """The version of the rows that are written next. Raises StoreError: a bad name of a part."""
        for part in parts:
            if not _PART.fullmatch(part):
                raise StoreError(
                    f"'{part}' cannot name a part of {head}: use at most 181 letters, digits, '.', '_' and '-', "
                    "beginning with a letter or a digit"
                )
        if not self._has_note:
            begin_format(self.root)
            self._has_note = True
        return next_version(self.root, head)


def _rows_of(episodes: Sequence[Episode]) -> dict[str, list[Row]]:
    """Rows by table."""
    return {
        "episodes": [episode_row(episode) for episode in episodes],
        "steps": [row for episode in episodes for row in step_rows(episode)],
        "sequences": [row for episode in episodes for row in sequence_rows(episode)],
    }


def _tables(head: str, parts: Mapping[str, Mapping[str, list[Row]]], version: int) -> dict[str, pa.Table]:
    """The rows of all parts, by table. `parts`: by part and table. Raises StoreError."""

    def stored_rows(table: str) -> pa.Table:
        books = {part: {"part": part, "part_version": version} for part in parts}
        rows = [row | books[part] for part, found in parts.items() for row in found[table]]
        return pa.Table.from_pylist(rows, schema=stored(table))

    try:
        return {table: stored_rows(table) for table in (head, *DETAILS_OF[head])}
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise StoreError(f"a value in part {', '.join(parts)} of {head} does not fit its column: {error}") from error


def _episodes(head: pa.Table, details: Mapping[str, pa.Table]) -> tuple[Episode, ...]:
    """Raises StoreError: an invalid value."""
    try:
        steps, sequences = (_by_episode(details[table]) for table in ("steps", "sequences"))
        return tuple(
            episode_from(row, steps.get(row["episode_id"], ()), sequences.get(row["episode_id"], ()))
            for row in head.to_pylist()
        )
    except (ValueError, TypeError, IndexError, pa.ArrowException) as error:
        parts = " or ".join(sorted({str(part) for part in head["part"].to_pylist()}))
        raise StoreError(f"part {parts} of episodes is damaged ({error}): remove it and run its stage again") from error


def _by_episode(details: pa.Table) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in details.to_pylist():
        found.setdefault(row["episode_id"], []).append(row)
    return found


def _need_distinct(part: str | None, kind: str, ids: Sequence[str]) -> None:
    """`part`: None for all parts of one commit. Raises StoreError if an id occurs twice."""
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        where = "the parts of one commit have" if part is None else f"part {part} has"
        raise StoreError(f"{where} {kind} {twice} twice: write each {kind} once")
