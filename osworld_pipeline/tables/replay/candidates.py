"""The candidates for replay, as a query for many tasks at once.

Only ids, lengths, rewards and action types are loaded into memory, not messages, tokens and images. Each file of the
store is read once for a stage, so that `look` reads only new files. For an update, only online successes, failures and
injections of earlier updates of its own stage, and of the updates that made its parents, count. So the same tables give
the same candidates, also after a kill.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import duckdb
import pyarrow as pa

from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.replay import ReplayKind, ReplayRow, base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.recipes.schema import ReplaySection
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.part_views import create_pinned_views, pin_snapshot, seed_tables
from osworld_pipeline.tables.replay.followed_rows import FollowedRows
from osworld_pipeline.tables.replay.history import BEFORE, NEWEST_FIRST, NOT_HELD, before
from osworld_pipeline.tables.replay.rows import parts_explained, read_replay_columns, replay_schema, verified_rewards

ONLINE = "online"
RECENT_GROUPS = 8
"""Number of a task's last groups that determine its recent success."""
_COLUMNS = (
    "row_id",
    "task_id",
    "original_task_id",
    "source_dataset",
    "quality_rank",
    "reward",
    "num_steps",
    "source_path",
    "source_line",
)
_DEMONSTRATIONS = """
CREATE TABLE demonstrations AS
SELECT d.row_id, 'demonstration' AS kind, d.task_id, d.original_task_id, d.source_dataset, d.quality_rank, d.reward,
       v.reward AS verified_reward, d.num_steps, {action_types} AS action_types, NULL::DOUBLE AS recorded_at,
       row_number() OVER (
           PARTITION BY d.original_task_id
           ORDER BY d.quality_rank DESC NULLS LAST, d.source_path, d.source_line, d.row_id
       ) AS place
FROM incoming d LEFT JOIN verified v USING (row_id)
WHERE d.reward >= $threshold AND (NOT $require_verified OR v.reward >= $threshold)
QUALIFY place <= $per_task
"""
_ONLINE = f"""
SELECT e.episode_id AS row_id, 'episode' AS kind,
       coalesce(nullif(regexp_extract(e.task_id, '(?s)\\A(.+)_chunk[0-9]+\\z', 1), ''), e.task_id) AS task_id,
       e.task_id AS original_task_id,
       '{ONLINE}' AS source_dataset, NULL::INT AS quality_rank, e.task_reward AS reward,
       e.task_reward AS verified_reward, e.num_steps, NULL::VARCHAR[] AS action_types, e.started_at AS recorded_at,
       row_number() OVER (PARTITION BY e.task_id ORDER BY e.started_at DESC, e.episode_id DESC) AS place
FROM own_successes e
WHERE {BEFORE} AND coalesce(e.group_id, '') NOT IN (SELECT group_id FROM own_groups WHERE NOT {NOT_HELD})
QUALIFY place <= $per_task
"""  # noqa: S608 - our own words
_IN_STAGES = "stage_key IN (SELECT unnest($stages))"
_UPDATE = '"update" + ("update" >= 0)::INTEGER AS "update"'
"""Files count updates from 0; the conditions of history.py count from 1."""
_SUCCESSES = {
    "name": "own_successes",
    "columns": f"episode_id, task_id, stage_key, {_UPDATE}, group_id, task_reward, num_steps, started_at",
    "where": f"purpose = 'train' AND is_valid AND is_success AND task_reward >= $threshold AND {_IN_STAGES}",
}
_GROUPS = {
    "name": "own_groups",
    "columns": f"group_id, task_id, stage_key, {_UPDATE}, fate, list_max(task_rewards) AS best",
    "where": f"{_IN_STAGES}",
}
_INJECTIONS = {"name": "own_injections", "columns": f"row_id, stage_key, {_UPDATE}", "where": _IN_STAGES}
_ACTION_TYPES = """
SELECT episode_id, list(action_type ORDER BY step_index) AS action_types
FROM steps WHERE episode_id IN (SELECT unnest($ids)) GROUP BY episode_id
"""
# Kinds alternate, so that neither many demonstrations nor many successes of a task displace the other kind.
_FIND = """
WITH pool AS (
    SELECT * RENAME (place AS turn) FROM (FROM demonstrations UNION ALL BY NAME FROM successes)
    WHERE task_id IN (SELECT base FROM asked)
), kept AS (
    SELECT row_id, kind, task_id, original_task_id, source_dataset, quality_rank, reward, verified_reward, num_steps,
           action_types, recorded_at, row_number() OVER (PARTITION BY original_task_id ORDER BY turn, kind) AS place
    FROM pool
    QUALIFY place <= $per_task
), found AS (
    SELECT a.asked, r.* FROM asked a JOIN kept r ON r.original_task_id = a.asked
    UNION ALL
    SELECT a.asked, r.* FROM asked a JOIN kept r ON r.task_id = a.base
    WHERE a.asked NOT IN (SELECT original_task_id FROM kept)
)
FROM found ORDER BY asked, original_task_id, place
"""
_FAILURES = f"""
SELECT task_id, best < $threshold
FROM own_groups
WHERE best IS NOT NULL AND {NOT_HELD} AND {BEFORE}
QUALIFY row_number() OVER (PARTITION BY task_id ORDER BY {NEWEST_FIRST}, group_id DESC) <= {RECENT_GROUPS}
"""  # noqa: S608 - our own words
_VERIFIED = pa.schema([("row_id", pa.string()), ("reward", pa.float64())])
_ASKED = pa.schema([("asked", pa.string()), ("base", pa.string())])
_INJECTED = f"SELECT DISTINCT row_id FROM own_injections WHERE {BEFORE}"  # noqa: S608 - our own words


class ReplayCandidate(NamedTuple):
    """A row that may join a group: the fields for the choice, without training data."""

    row_id: str
    kind: ReplayKind
    task_id: str
    original_task_id: str
    source_dataset: str
    quality_rank: int | None
    """None for an episode."""
    reward: float
    verified_reward: float | None
    num_steps: int
    action_types: Sequence[str] | None
    """One for each step; None if they were not recorded, or the strategy is not `diverse`."""
    recorded_at: float | None
    """Unix time; None for a demonstration."""
    place: int
    """1 for the first of its original task id."""


@dataclass(frozen=True, kw_only=True)
class RecentGroups:
    """Results of a task's last groups, without those that have no reward."""

    num_groups: int = 0
    num_failed: int = 0


class ReplayCandidates:
    """Queries for one stage: the current demonstrations, and the online rollouts that `look` finds."""

    def __init__(
        self, state: StateDir, section: ReplaySection, *, stage_key: str = "", lineage: Sequence[Ancestor] = ()
    ) -> None:
        """`lineage`: the stages this one descends from, the nearest first.

        Raises:
            TableError: the tables cannot be read.
            StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
        """
        self._state = state
        self._section = section
        self._stage_key = stage_key
        self._lineage = list(lineage)
        self._failures: dict[str, RecentGroups] = {}
        self._injected: frozenset[str] = frozenset()
        self._in_use = threading.RLock()
        """A connection takes one call at a time, and `close` may come from another thread while a choice runs."""
        self._memory = duckdb.connect(":memory:")
        self._views: duckdb.DuckDBPyConnection | None = None
        self._followed: tuple[FollowedRows, ...] = ()
        self._action_types: dict[str, list[str]] = {}
        verified = verified_rewards(state)
        with self._explained():
            self._load("verified", pa.table({"row_id": list(verified), "reward": list(verified.values())}, _VERIFIED))
            has_actions = section.strategy == "diverse"
            columns = (*_COLUMNS, "action_types") if has_actions else _COLUMNS
            incoming = pa.RecordBatchReader.from_batches(replay_schema(columns), read_replay_columns(state, columns))
            self._memory.register("incoming", incoming)
            self._memory.execute(
                _DEMONSTRATIONS.format(action_types="d.action_types" if has_actions else "NULL::VARCHAR[]"),
                {
                    "threshold": section.threshold,
                    "require_verified": section.require_verified,
                    "per_task": section.per_task,
                },
            )
            self._memory.unregister("incoming")
            self._memory.execute("CREATE TABLE successes AS FROM demonstrations LIMIT 0")

    def look(self, update: int) -> None:
        """Selects the rows for `update` (from 0), only from updates before it; reads the files that are new since the
        last call.

        Raises:
            TableError: the tables cannot be read.
            StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
        """
        strategy = self._section.strategy
        if not self._section.include_online and strategy not in ("recent_failure", "diverse"):
            return
        seen = before(self._stage_key, update, self._lineage)
        threshold = {"threshold": self._section.threshold}
        with parts_explained(self._state), self._in_use:
            self._follow(seen["stages"])
            if self._section.include_online:
                asked = seen | {"per_task": self._section.per_task}
                successes = self._memory.sql(_ONLINE, params=asked).to_arrow_table()
                if strategy == "diverse":
                    successes = self._with_action_types(successes)
                self._load("successes", successes)
            if strategy == "recent_failure":
                self._failures = _recent(self._memory.execute(_FAILURES, seen | threshold).fetchall())
            if strategy == "diverse":
                found = self._memory.execute(_INJECTED, seen).fetchall()
                self._injected = frozenset(row_id for (row_id,) in found)

    def _follow(self, stages: Sequence[str]) -> None:
        """`stages`: the same at each call."""
        if not self._followed:
            seed_tables(self._state)
            self._followed = (
                FollowedRows(self._memory, self._state, "episodes", **_SUCCESSES),
                FollowedRows(self._memory, self._state, "rollout_groups", **_GROUPS),
                FollowedRows(self._memory, self._state, "injections", **_INJECTIONS),
            )
        successes, groups, injections = self._followed
        if self._section.include_online:
            successes.refresh({"stages": stages, "threshold": self._section.threshold})
        groups.refresh({"stages": stages})
        if self._section.strategy == "diverse":
            injections.refresh({"stages": stages})

    def _with_action_types(self, successes: pa.Table) -> pa.Table:
        ids = successes.column("row_id").to_pylist()
        unknown = [name for name in ids if name not in self._action_types]
        if unknown:
            self._action_types |= dict(self._views_of_now().execute(_ACTION_TYPES, {"ids": unknown}).fetchall())
        types = pa.array([self._action_types.get(name) for name in ids], pa.list_(pa.string()))
        return successes.set_column(successes.schema.get_field_index("action_types"), "action_types", types)

    @property
    def injected(self) -> frozenset[str]:
        """Ids of the rows that joined a group before; only for the strategy `diverse`."""
        return self._injected

    def recent_groups(self, task_id: str) -> RecentGroups:
        """The recent groups of a task, used only by the strategy `recent_failure`."""
        return self._failures.get(task_id, RecentGroups())

    def find(self, task_ids: Sequence[str]) -> dict[str, list[ReplayCandidate]]:
        """The candidates of each task that has any: the rows of its exact id, else those of all chunks of its base id,
        in a fixed order. At most `per_task` rows per original task id."""
        asked = sorted(set(task_ids))
        found: dict[str, list[ReplayCandidate]] = {}
        with self._explained():
            self._load("asked", pa.table({"asked": asked, "base": [base_task_id(name) for name in asked]}, _ASKED))
            rows = self._memory.execute(_FIND, {"per_task": self._section.per_task}).fetchall()
        for name, *values in rows:
            found.setdefault(name, []).append(ReplayCandidate._make(values))
        return found

    def close(self) -> None:
        with self._in_use:
            self._memory.close()
            if self._views is not None:
                self._views.close()

    def _views_of_now(self) -> duckdb.DuckDBPyConnection:
        if self._views is None:
            self._views = duckdb.connect(":memory:")
            create_pinned_views(self._views, self._state, "steps")
        else:
            pin_snapshot(self._views, self._state)
        return self._views

    def _load(self, name: str, table: pa.Table) -> None:
        self._memory.register("arriving", table)
        self._memory.execute(f"CREATE OR REPLACE TABLE {name} AS FROM arriving")
        self._memory.unregister("arriving")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with self._in_use:
                yield
        except duckdb.Error as error:
            raise TableError(f"cannot choose replay rows of {self._state.root}: {first_line(error)}") from error


def online_row(candidate: ReplayCandidate) -> ReplayRow:
    """An episode as a replay row: it has no messages, only the episode's tokens."""
    return ReplayRow(
        row_id=candidate.row_id,
        kind="episode",
        task_id=candidate.task_id,
        original_task_id=candidate.original_task_id,
        source_dataset=candidate.source_dataset,
        reward=candidate.reward,
        verified_reward=candidate.verified_reward,
    )


def _recent(rows: Sequence[tuple[str, bool]]) -> dict[str, RecentGroups]:
    counts: dict[str, list[bool]] = {}
    for task_id, is_failed in rows:
        counts.setdefault(task_id, []).append(is_failed)
    return {name: RecentGroups(num_groups=len(ends), num_failed=sum(ends)) for name, ends in counts.items()}
