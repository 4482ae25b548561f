"""Walks the lineage views from any id: the object itself, its origin, and its descendants."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import duckdb

from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.query import TIMEOUT_S, open_catalog

KINDS = ("evaluation episode", "training episode", "checkpoint", "task", "replay row", "screenshot")


@dataclass(frozen=True, kw_only=True)
class Link:
    """An object by id, with its fields from the views and the objects linked to it."""

    kind: str
    id: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    links: tuple["Link", ...] = ()
    num_more: int = 0
    """Number of further objects of the same kind that are not shown."""


def walk(state: StateDir, thing: str, *, limit: int = 20, timeout_s: float = TIMEOUT_S) -> Link:
    """`limit`: objects shown of each kind; the rest is counted.

    Raises:
        TableError: no object has that id; or as run_query.
    """
    try:
        with open_catalog(state) as connection, _interrupting(connection, timeout_s):
            ask = _Asker(connection=connection, limit=limit)
            for find in (_checkpoint, _episode, _task, _replay_row, _screenshot):
                found = find(ask, thing)
                if found is not None:
                    return found
    except duckdb.InterruptException as error:
        raise TableError(
            f"the look-up of '{thing}' took longer than {timeout_s:g} s: run {pipeline_line(state, 'compact')} first"
        ) from error
    except duckdb.Error as error:
        raise TableError(
            f"the catalog cannot be read: {first_line(error)}; {pipeline_line(state, 'rebuild-catalog')} rebuilds it"
        ) from error
    raise TableError(
        f"nothing in {state.root} has the id '{thing}': give the full id of one of these: {', '.join(KINDS)} "
        f"(its SHA-256); if the object is new, run {pipeline_line(state, 'rebuild-catalog')} first"
    )


@contextmanager
def _interrupting(connection: duckdb.DuckDBPyConnection, timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, kw_only=True)
class _Asker:
    connection: duckdb.DuckDBPyConnection
    limit: int

    def __call__(self, sql: str, **values: str) -> list[dict[str, Any]]:
        """`values` replace {name} in `sql`, quoted as text."""
        quoted = {name: "'" + value.replace("'", "''") + "'" for name, value in values.items()}
        return self.connection.sql(sql.format(**quoted)).to_arrow_table().to_pylist()

    def links(self, kind: str, sql: str, key: str, **values: str) -> tuple[Link, ...]:
        """The rows of `sql` as links of one kind; `key` is the column with their id."""
        count = self(f"SELECT count(*) AS n FROM ({sql})", **values)[0]["n"]  # noqa: S608 - our own questions
        rows = self(f"{sql} LIMIT {self.limit}", **values)
        shown = [_link(kind, row, key) for row in rows]
        if count > len(shown):
            shown.append(Link(kind=kind, id="", num_more=count - len(shown)))
        return tuple(shown)


def _link(kind: str, row: Mapping[str, Any], key: str, links: Sequence[Link] = ()) -> Link:
    facts = {name: value for name, value in row.items() if name != key and value not in (None, "")}
    return Link(kind=kind, id=str(row[key]), facts=facts, links=tuple(links))


_CHECKPOINT = """
SELECT checkpoint_id, stage, num_updates, path, code_version, is_code_dirty, recipe->>'$.name' AS recipe,
       left(recipe_digest, 12) AS recipe_digest, left(data_digest, 12) AS data_digest,
       run_ids['dagster'] AS dagster_run, run_ids['mlflow'] AS mlflow_run
FROM checkpoints WHERE checkpoint_id = {id}
"""
_MADE = """
SELECT source_id, how, any_value(task_id) AS task, count(DISTINCT group_id) AS "groups",
       any_value(source_dataset) AS source, any_value(path) AS path, any_value(line) AS line,
       any_value(licence) AS licence, any_value(sha256) AS sha256
FROM made_from WHERE checkpoint_id = {id} AND kind = '%s' AND how <> 'rolled_out'
GROUP BY source_id, how ORDER BY how, source_id
"""
_GROUPS = """
SELECT source_id, "update", task_id AS task FROM made_from WHERE checkpoint_id = {id} AND kind = 'group'
ORDER BY "update", source_id
"""
_EVALS_OF = """
SELECT stage_key, count(*) AS episodes, count(success) AS valid, count(*) FILTER (success) AS successes
FROM evals WHERE checkpoint_id = {id} GROUP BY stage_key ORDER BY stage_key
"""
_CHILDREN = "SELECT checkpoint_id, stage FROM checkpoints WHERE parent_id = {id} ORDER BY checkpoint_id"
_EPISODE = """
SELECT episode_id, purpose, task_id AS task, checkpoint_id, stage, weights_id, weights_update,
       stage_key, "update", group_id, seed, outcome, task_reward,
       provider, run_ids['dagster'] AS dagster_run, run_ids['mlflow'] AS mlflow_run
FROM episodes WHERE episode_id = {id}
"""
_SCREENSHOTS = """
SELECT screenshot_sha256 AS sha256, step_index AS step, command,
       'blobs/' || left(screenshot_sha256, 2) || '/' || screenshot_sha256 || '.' || screenshot_format AS path
FROM steps WHERE episode_id = {id} AND screenshot_sha256 <> '' ORDER BY step_index
"""
_TASK = "SELECT task_id, domain, instruction, task_config_source AS source FROM union_tasks WHERE task_id = {id}"
_TASK_EVALS = """
SELECT episode_id, checkpoint_id, seed, outcome FROM evals WHERE task_id = {id}
ORDER BY checkpoint_id, seed, episode_id
"""
_TASK_ROWS = "SELECT row_id, kind, source_dataset AS source, source_path AS path, source_line AS line FROM replay "
_ROW = """
SELECT row_id, kind, task_id AS task, source_dataset AS source, source_path AS path, source_line AS line, reward,
       verified_reward, licence
FROM replay WHERE row_id = {id}
"""
_TRAINED_ROW = """
SELECT source_id AS row_id, kind, any_value(task_id) AS task, any_value(source_dataset) AS source,
       any_value(path) AS path, any_value(line) AS line, any_value(licence) AS licence
FROM made_from WHERE source_id = {id} AND kind = 'demonstration' GROUP BY source_id, kind
"""
_TAUGHT = """
SELECT a.checkpoint_id, string_agg(DISTINCT m.how, ', ') AS how, min(a.generations) AS generations_later
FROM made_from m JOIN ancestry a ON a.ancestor_id = m.checkpoint_id
WHERE m.source_id = {id} GROUP BY a.checkpoint_id ORDER BY generations_later, a.checkpoint_id
"""
_SEEN_IN = """
SELECT episode_id, any_value(purpose) AS purpose, any_value(task_id) AS task, any_value(checkpoint_id) AS checkpoint,
       list(step_index ORDER BY step_index) AS steps, any_value(screenshot_format) AS format
FROM steps WHERE screenshot_sha256 = {id} GROUP BY episode_id ORDER BY purpose, episode_id
"""
_SHOWN_BY = """
SELECT row_id, task_id AS task, source_dataset AS source FROM replay_buffer WHERE list_contains(images, {id})
ORDER BY row_id
"""


def _checkpoint(ask: _Asker, thing: str, *, with_ancestry: bool = True) -> Link | None:
    rows = ask(_CHECKPOINT, id=thing)
    if not rows:
        return None
    links = [
        *ask.links("demonstration", _MADE % "demonstration", "source_id", id=thing),
        *ask.links("episode", _MADE % "episode", "source_id", id=thing),
        *ask.links("group", _GROUPS, "source_id", id=thing),
    ]
    if with_ancestry:
        links += [
            *ask.links("evaluation", _EVALS_OF, "stage_key", id=thing),
            *ask.links("child", _CHILDREN, "checkpoint_id", id=thing),
            *_parents(ask, thing),
        ]
    return _link("checkpoint", rows[0], "checkpoint_id", links)


def _parents(ask: _Asker, checkpoint_id: str) -> tuple[Link, ...]:
    """The parent, with its parent below it, and so on."""
    line = ask(
        "SELECT ancestor_id FROM ancestry WHERE checkpoint_id = {id} AND generations > 0 ORDER BY generations DESC",
        id=checkpoint_id,
    )
    below: tuple[Link, ...] = ()
    for row in line:
        parent = _checkpoint(ask, row["ancestor_id"], with_ancestry=False)
        assert parent is not None, f"{row['ancestor_id']} is an ancestor and not a checkpoint"
        below = (Link(kind="parent", id=parent.id, facts=parent.facts, links=(*parent.links, *below)),)
    return below


def _episode(ask: _Asker, thing: str) -> Link | None:
    rows = ask(_EPISODE, id=thing)
    if not rows:
        return None
    row = rows[0]
    is_evaluation = row["purpose"] == "evaluate"
    links = [
        *ask.links("task", _TASK, "task_id", id=row["task"] or ""),
        *ask.links("screenshot", _SCREENSHOTS, "sha256", id=thing),
    ]
    if not is_evaluation:
        links += ask.links("taught", _TAUGHT, "checkpoint_id", id=thing)
    player = _checkpoint(ask, row["weights_id"] or "", with_ancestry=False)
    player = player or _checkpoint(ask, row["checkpoint_id"] or "", with_ancestry=False)
    if player is not None:
        parents = _parents(ask, player.id) if is_evaluation else ()
        links.append(Link(kind="checkpoint", id=player.id, facts=player.facts, links=(*player.links, *parents)))
    return _link("evaluation episode" if is_evaluation else f"{row['purpose']} episode", row, "episode_id", links)


def _task(ask: _Asker, thing: str) -> Link | None:
    rows = ask(_TASK, id=thing)
    if not rows:
        return None
    links = [
        *ask.links("replay row", f"{_TASK_ROWS} WHERE task_id = {{id}} ORDER BY kind, row_id", "row_id", id=thing),
        *ask.links("evaluation episode", _TASK_EVALS, "episode_id", id=thing),
    ]
    return _link("task", rows[0], "task_id", links)


def _replay_row(ask: _Asker, thing: str) -> Link | None:
    rows = ask(_ROW, id=thing) or ask(_TRAINED_ROW, id=thing)
    if not rows:
        return None
    screenshots = "SELECT unnest(images) AS sha256 FROM replay_buffer WHERE row_id = {id}"
    links = [
        *ask.links("task", _TASK, "task_id", id=rows[0]["task"] or ""),
        *ask.links("screenshot", screenshots, "sha256", id=thing),
        *ask.links("taught", _TAUGHT, "checkpoint_id", id=thing),
        *_touched(ask, thing),
    ]
    return _link("replay row", rows[0], "row_id", links)


_TOUCHED = """
SELECT v.stage_key, any_value(v.checkpoint_id) AS checkpoint, count(*) AS episodes, count(*) FILTER (v.success)
       AS successes
FROM evals v
WHERE v.checkpoint_id IN (
    SELECT a.checkpoint_id FROM made_from m JOIN ancestry a ON a.ancestor_id = m.checkpoint_id WHERE m.source_id = {id}
)
GROUP BY v.stage_key ORDER BY v.stage_key
"""


def _touched(ask: _Asker, thing: str) -> tuple[Link, ...]:
    return ask.links("evaluation touched", _TOUCHED, "stage_key", id=thing)


def _screenshot(ask: _Asker, thing: str) -> Link | None:
    links = (
        *ask.links("seen in", _SEEN_IN, "episode_id", id=thing),
        *ask.links("shown by", _SHOWN_BY, "row_id", id=thing),
    )
    if not links:
        return None
    suffix = next((link.facts["format"] for link in links if "format" in link.facts), None)
    facts = {"path": f"blobs/{thing[:2]}/{thing}.{suffix}"} if suffix else {}
    return Link(kind="screenshot", id=thing, facts=facts, links=links)
