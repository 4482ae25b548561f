"""Invariants of the tables and the store; each query lists its violations. Used by the asset checks and by users who
check a state. Everything is streamed or queried in SQL."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from osworld_pipeline.datasets.union.tasks import ASKED_FOR
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.replay import base_task_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.runs.upkeep.upkeep import missing_blobs
from osworld_pipeline.runs.verify_replay.summary import read_summary
from osworld_pipeline.tables.owned import read_table, table_path
from osworld_pipeline.tables.query import run_query

MAX_FOUND = 20
"""How many violations are listed: one is enough to fail, and thousands do not help."""
MAX_REJECT_SHARE = 0.5
MIN_RECORDS = 20
"""A share of fewer records is not meaningful."""
MAX_FAILED_SHARE = 0.1
ROWS_PER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Violations:
    """The first violations of an invariant, as rows of a table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    num_found: int

    @property
    def is_sound(self) -> bool:
        return self.num_found == 0


MAX_KL = 5.0
"""Nats per token between a policy and its reference; above this the policy has almost nothing in common with the
reference."""
MAX_SAMPLER_DIFF = 0.05
"""Limit of the mean difference of log-probabilities between trainer and sampler; bfloat16 causes a fifth of it."""
UNSOUND_TRAINING = f"""
SELECT checkpoint_id, figure.key AS figure, figure.value AS value
FROM (SELECT checkpoint_id, unnest(map_entries(metrics)) AS figure FROM checkpoints)
WHERE (figure.key IN ('loss', 'kl', 'grad_norm', 'entropy', 'ratio_mean') AND NOT isfinite(figure.value))
   OR (figure.key = 'kl' AND figure.value > {MAX_KL})
   OR (figure.key = 'trainer_sampler_logprob_diff' AND NOT figure.value <= {MAX_SAMPLER_DIFF})
ORDER BY ALL
"""  # noqa: S608 - our own numbers

_NOT_REQUESTED = " AND ".join(
    f"NOT starts_with(coalesce(t.task_config ->> '$.source', ''), '{prefix}')" for prefix in ASKED_FOR
)
UNFIT_TRAIN_TASKS = f"""
SELECT t.task_id, CASE WHEN NOT coalesce(t.has_task_config, false) OR t.task_config IS NULL THEN 'no config'
                       WHEN t.platform = 'windows' AND {_NOT_REQUESTED} THEN 'a Windows task'
                       ELSE 'no demonstration' END AS problem
FROM train_tasks t
WHERE NOT coalesce(t.has_task_config, false) OR t.task_config IS NULL
   OR (t.platform = 'windows' AND {_NOT_REQUESTED})
   OR t.task_id NOT IN (SELECT task_id FROM replay_buffer)
ORDER BY 1
"""  # noqa: S608 - our own prefixes

ORPHAN_INJECTIONS = """
SELECT i.injection_id, i.group_id, i.row_id,
       CASE WHEN g.group_id IS NULL THEN 'its group is gone' ELSE 'its replay row is gone' END AS problem
FROM injections i
LEFT JOIN rollout_groups g ON g.group_id = i.group_id
LEFT JOIN (
    SELECT row_id FROM replay_buffer UNION SELECT former_row_id FROM replay_buffer UNION SELECT episode_id FROM episodes
) r ON r.row_id = i.row_id
WHERE g.group_id IS NULL OR (r.row_id IS NULL AND i.source_path IS NULL)
ORDER BY 1
"""

# A fault may end an episode in any turn, but the number of its stored steps must equal `num_steps` in its row.
EPISODES_WITHOUT_THEIR_STEPS = """
SELECT coalesce(e.episode_id, s.episode_id) AS episode_id, coalesce(e.num_steps, 0) AS expected,
       coalesce(s.found, 0) AS found
FROM episodes e
FULL JOIN (SELECT episode_id, count(*) AS found FROM steps GROUP BY 1) s ON s.episode_id = e.episode_id
WHERE e.episode_id IS NULL OR coalesce(s.found, 0) != coalesce(e.num_steps, 0)
ORDER BY 1
"""

SOURCES_OF_REJECTS = f"""
SELECT source_dataset, num_records, num_rejects, num_rejects / (num_records + num_rejects) AS share
FROM raw_counts
WHERE num_records + num_rejects >= {MIN_RECORDS} AND num_rejects > {MAX_REJECT_SHARE} * (num_records + num_rejects)
ORDER BY 1
"""  # noqa: S608 - our own numbers


def find_violations(state: StateDir, sql: str) -> Violations:
    """Rows that one of the queries above finds in the catalog. Raises TableError."""
    result = run_query(state, sql)
    return _violations(result.columns, result.rows)


def task_ids_twice(state: StateDir) -> Violations:
    """Tasks (domain and id) that occur more than once in union_tasks, and ids that are not base ids. Reads the table's
    file, because a catalog with such a table cannot be built. Raises TableError."""
    tasks = read_table(state, "union_tasks").select(["task_id", "domain"]).to_pylist()
    counts = Counter((task["task_id"], task["domain"] or "") for task in tasks)
    twice = [(task_id, f"{count} rows") for (task_id, _), count in sorted(counts.items()) if count > 1]
    ids = sorted({task_id for task_id, _ in counts})
    chunks = [(task_id, "an id of a chunk") for task_id in ids if base_task_id(task_id) != task_id]
    return _violations(("task_id", "problem"), [*twice, *chunks])


def missing_images(state: StateDir) -> Violations:
    """Images that a row names and the store lacks. Raises StoreError."""
    return _violations(
        ("image", "named in"), sorted((sha256, str(path)) for sha256, path in missing_blobs(state).items())
    )


def false_demonstrations(state: StateDir) -> Violations:
    """The demonstrations whose playback failed, if they are more than a tenth of those with a verdict."""
    summary = read_summary(state)
    if summary is None or len(summary.failed) <= MAX_FAILED_SHARE * (summary.num_verified + summary.num_failed):
        return _violations((), [])
    rows = [(one.row_id, one.task_id, one.source, max(one.earned, default=None)) for one in summary.failed]
    return _violations(("row_id", "task_id", "source", "earned"), rows)


def unreadable_replay_rows(state: StateDir) -> Violations:
    """Rows of the replay buffer without turns, or with a turn that their dialect cannot parse.

    Raises:
        TableError: the table's file is damaged.
    """
    found: list[tuple[Any, ...]] = []
    for row in _replay_rows(state):
        name = row["dialect"] or "slime"
        turns = [_text(message) for message in row["messages"] or () if message["role"] == "assistant"]
        error = _why_unreadable(name, turns)
        if error is not None:
            found.append((row["row_id"], row["source_path"], row["source_line"], name, error))
    columns = ("row_id", "source_path", "source_line", "dialect", "problem")
    return _violations(columns, found)


def _violations(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Violations:
    return Violations(columns=tuple(columns), rows=tuple(tuple(row) for row in rows[:MAX_FOUND]), num_found=len(rows))


def _replay_rows(state: StateDir) -> Iterator[dict[str, Any]]:
    path = table_path(state, "replay_buffer")
    if not path.is_file():
        return
    wanted = ("row_id", "source_path", "source_line", "dialect", "messages")
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
                for row in batch.to_pylist():
                    yield {name: row.get(name) for name in wanted}
    except pa.ArrowException as error:
        raise TableError(f"{path} is damaged ({error}): remove it and materialize replay_buffer again") from error


def _why_unreadable(dialect: str, turns: Sequence[str]) -> str | None:
    if not turns:
        return "it has no agent turn"
    for index, text in enumerate(turns):
        try:
            error = _turn_error(dialect, text)
        except ValueError as unknown:
            return str(unknown)
        if error is not None:
            return f"turn {index}: {error}"
    return None


@lru_cache(maxsize=10_000)
def _turn_error(dialect: str, text: str) -> str | None:
    turn = load_dialect(dialect).parse(text)
    return None if turn.is_parsed else turn.error or "no action found"


def _text(message: Any) -> str:
    return "".join(part["text"] or "" for part in message["content"] or () if part["type"] == "text")
