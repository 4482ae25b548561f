"""The trajectory store: finished episodes and groups as Parquet parts, screenshots as blobs; many writers, no lock.

A part is two files, and the first one's rename is its commit: `episodes/<part>.parquet` names (by digest) the steps
file `steps/<part>.<digest>.parquet` it belongs to, as `rollout_groups/` does for `injections/`. A reader joins the two,
so it sees a part whole, or as it was before, or not at all.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.columns import PART_TABLES, conform
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.durable import parquet_bytes, remove_stale_temps, write_file
from osworld_pipeline.errors import StoreError
from osworld_pipeline.trajectories.blobs import BlobStore
from osworld_pipeline.trajectories.rows import Row, episode_from, episode_row, group_row, injection_row, step_rows

DETAIL_OF = {"episodes": "steps", "rollout_groups": "injections"}
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}")


class TrajectoryStore:
    """Implements protocols.EpisodeSink over a state folder."""

    def __init__(self, state: StateDir) -> None:
        self.root = state.trajectories
        self.blobs = BlobStore(state.blobs)
        self.blobs.remove_stale_temps()
        for table in PART_TABLES:
            remove_stale_temps(self.root / table)

    def write_blob(self, data: bytes, *, suffix: str) -> str:
        """Stores an image once; returns its SHA-256. Raises StoreError."""
        return self.blobs.write(data, suffix=suffix)

    def read_blob(self, sha256: str) -> bytes:
        """Raises StoreError where there is no such image."""
        return self.blobs.read(sha256)

    def write_episodes(self, part: str, episodes: Sequence[Episode]) -> None:
        """One atomic part of `episodes` and `steps`; a part of that name is replaced.

        Raises:
            StoreError: a bad part name, the same episode twice, or the file system refused.
        """
        _need_distinct(part, "episode", [episode.episode_id for episode in episodes])
        steps = [row for episode in episodes for row in step_rows(episode)]
        self._write_part("episodes", part, [episode_row(episode) for episode in episodes], steps)

    def write_groups(self, part: str, groups: Sequence[RolloutGroup], injections: Sequence[Injection]) -> None:
        """One atomic part of `rollout_groups` and `injections`; a part of that name is replaced. Raises StoreError."""
        _need_distinct(part, "group", [group.group_id for group in groups])
        _need_distinct(part, "injection", [injection.injection_id for injection in injections])
        by_id = {group.group_id: group for group in groups}
        rows = [injection_row(injection, by_id.get(injection.group_id)) for injection in injections]
        self._write_part("rollout_groups", part, [group_row(group) for group in groups], rows)

    def existing_parts(self, table: str = "episodes", prefix: str = "") -> list[str]:
        """Names of the committed parts of `episodes` (with its steps) or `rollout_groups` (with its injections)."""
        head = {detail: head for head, detail in DETAIL_OF.items()}.get(table, table)
        names = (path.name.removesuffix(".parquet") for path in (self.root / head).glob("*.parquet"))
        return sorted(name for name in names if name.startswith(prefix) and not name.startswith("_"))

    def read_episodes(self, part: str) -> tuple[Episode, ...]:
        """The episodes of a part, as they were written.

        Raises:
            StoreError: no such part.
        """
        rows = self._read("episodes", f"{part}.parquet", part)
        steps: dict[str, list[Row]] = {}
        if rows:
            for row in self._read("steps", f"{part}.{rows[0]['part_digest']}.parquet", part):
                steps.setdefault(row["episode_id"], []).append(row)
        return tuple(episode_from(row, steps.get(row["episode_id"], [])) for row in rows)

    def remove_parts(self, prefix: str, keep: Collection[str] = ()) -> int:
        """Removes the parts whose names begin with `prefix`, but those in `keep`; returns how many episode parts."""
        removed = 0
        for head, detail in DETAIL_OF.items():
            for part in self.existing_parts(head, prefix):
                if part not in keep:
                    (self.root / head / f"{part}.parquet").unlink(missing_ok=True)
                    self._remove_details(detail, part, keep=None)
                    removed += head == "episodes"
        return removed

    def _write_part(self, head: str, part: str, rows: list[Row], details: list[Row]) -> None:
        if not _PART.fullmatch(part):
            raise StoreError(f"'{part}' cannot name a part of {head}: use letters, digits, '.', '_' and '-'")
        detail = DETAIL_OF[head]
        try:
            detail_table = pa.Table.from_pylist(details, schema=PART_TABLES[detail])
            head_table = pa.Table.from_pylist(rows, schema=PART_TABLES[head])
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise StoreError(f"part {part} of {head} holds a value that its columns cannot: {error}") from error
        digest = hashlib.sha256(parquet_bytes(detail_table)).hexdigest()[:12]
        write_file(self.root / detail / f"{part}.{digest}.parquet", parquet_bytes(_stamped(detail_table, digest)))
        write_file(self.root / head / f"{part}.parquet", parquet_bytes(_stamped(head_table, digest)))
        self._remove_details(detail, part, keep=digest)

    def _remove_details(self, detail: str, part: str, *, keep: str | None) -> None:
        """What an older or a killed writer of the part left; nothing refers to it any more."""
        pattern = re.compile(rf"{re.escape(part)}\.([0-9a-f]{{12}})\.parquet")
        for path in (self.root / detail).glob(f"{part}.*.parquet"):
            match = pattern.fullmatch(path.name)
            if match and match[1] != keep:
                path.unlink(missing_ok=True)

    def _read(self, table: str, name: str, part: str) -> list[dict[str, Any]]:
        path = self.root / table / name
        try:
            return conform(pq.read_table(path), PART_TABLES[table]).to_pylist()
        except FileNotFoundError as error:
            raise StoreError(f"there is no part '{part}' of {table} in {self.root}") from error
        except pa.ArrowException as error:
            raise StoreError(f"{path} is damaged ({error}): remove it and run its stage again") from error


def _stamped(table: pa.Table, digest: str) -> pa.Table:
    index = table.schema.get_field_index("part_digest")
    return table.set_column(index, "part_digest", pa.array([digest] * table.num_rows, pa.string()))


def _need_distinct(part: str, kind: str, ids: Sequence[str]) -> None:
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise StoreError(f"part {part} holds {kind} {twice} twice: the ids of a part must differ")
