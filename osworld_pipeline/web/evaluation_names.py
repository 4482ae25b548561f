"""Readable names of evaluations: the suite and the recorded settings. The key of an evaluation is only a digest."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import BUILT_IN_SUITES
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.evaluation.suite_files import HELDOUT, EvalSuite, read_suite_file
from osworld_pipeline.evaluation.suites.family import BLOCK
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.web.formats import UNKNOWN, counted, when

UNKNOWN_SETTINGS = "settings not recorded"
NO_SUITE = "osworld"
"""The suite in the view `evals` of a task whose id names none."""
_TASK = re.compile(rf"({'|'.join(BUILT_IN_SUITES)})-[a-z0-9_]+-([0-9]+)")
_REPORT = re.compile(r"suite-(.+)-([^-]+)")

PLAYED = """
SELECT key, list(DISTINCT task_id) AS task_ids, list(DISTINCT seed) AS seeds, list(DISTINCT max_turns) AS max_turns,
       list(DISTINCT temperature) AS temperatures, list(DISTINCT engine) AS engines,
       min(started_at) FILTER (started_at > 0) AS began_at, max(nullif(suite_name, '')) AS suite_name
FROM (
    SELECT *, CASE WHEN starts_with(stage_key, concat('eval-', checkpoint_id, '-'))
        THEN substr(stage_key, length(checkpoint_id) + 7) ELSE '' END AS key
    FROM {source} WHERE purpose = 'evaluate'
) GROUP BY key
"""
"""The recorded facts of each evaluation; `source` has the columns of `episodes`."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """All episodes under one key, of any policy. A row of PLAYED."""

    key: str
    task_ids: Sequence[str]
    seeds: Sequence[int | None]
    max_turns: Sequence[int | None]
    temperatures: Sequence[float | None]
    engines: Sequence[str | None]
    began_at: float | None
    """Unix time; None if unknown."""
    suite_name: str | None = None
    """The name that the episodes recorded; None before schema version 6."""


@dataclass(frozen=True, kw_only=True)
class EvaluationName:
    key: str
    suite: str
    """Its name in commands, if known."""
    origin: str
    """The suite in the tasks' ids; empty if it is the same or none."""
    settings: str
    """The settings that distinguish it from others of the suite."""
    began_at: float | None

    @property
    def words(self) -> str:
        return f"{self.suite} · {self.settings}"

    @property
    def order(self) -> tuple[str, float, str]:
        """Sorts by suite, then by time."""
        return self.suite, self.began_at or 0.0, self.key


def read_evaluation_names(state: StateDir) -> dict[str, EvaluationName]:
    """The names by evaluation key, in the order of suite and time. Raises TableError."""
    with fresh_views(state, "episodes") as connection:
        cursor = connection.execute(PLAYED.format(source="episodes"))
        columns = [column[0] for column in cursor.description or ()]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    return name_evaluations(rows, suites=own_suites(state), recorded=recorded_suites(state))


def name_evaluations(
    rows: Iterable[Mapping[str, Any]], *, suites: Iterable[EvalSuite], recorded: Mapping[str, str]
) -> dict[str, EvaluationName]:
    """Names by key, in the order of suite and time. `rows`: of PLAYED; `suites`: the user's own; `recorded`: suites by
    key, from the names of reports. Tasks, turns and engine are named if the evaluations of a suite differ in them, and
    the start time if all else is equal."""
    there = {suite.name: frozenset(task.task_id for task in suite.tasks) for suite in suites}
    named = []
    for played in (Played(**row) for row in rows):
        by_id = suite_by_id(played.task_ids)
        suite = recorded.get(played.key) or played.suite_name or suite_of(played.task_ids, there)
        origin = by_id if by_id not in (suite, NO_SUITE) else ""
        name = EvaluationName(key=played.key, suite=suite, origin=origin, settings="", began_at=played.began_at)
        named.append((name, played))
    named.sort(key=lambda pair: pair[0].order)
    found: dict[str, EvaluationName] = {}
    for _, group in groupby(named, key=lambda pair: pair[0].suite):
        found |= {name.key: name for name in _with_settings(list(group))}
    return found


def name_of(key: str, names: Mapping[str, EvaluationName]) -> str:
    """The name in words; the key itself for an evaluation that is not in the tables."""
    return names[key].words if key in names else f"evaluation {key}"


def evaluation_words(stage_key: str | None, names: Mapping[str, EvaluationName]) -> str:
    """The evaluation and the checkpoint of `eval-<checkpoint>-<key>`; any other key unchanged."""
    policy, _, key = (stage_key or "").rpartition("-")
    name = names.get(key) if policy.startswith("eval-") else None
    return f"{name.words} · {policy.removeprefix('eval-')}" if name else stage_key or ""


def suite_words(stage_key: str | None, names: Mapping[str, EvaluationName]) -> str:
    """The suite of an evaluation; empty for any other key."""
    policy, _, key = (stage_key or "").rpartition("-")
    name = names.get(key) if policy.startswith("eval-") else None
    return name.suite if name else ""


def suite_of(task_ids: Collection[str], own: Mapping[str, frozenset[str]]) -> str:
    """The name of the suite of these tasks: `heldout` for held-out tasks of a built-in suite, or the smallest of the
    user's suites that has them all; else the suite in the ids."""
    read = [_TASK.fullmatch(task_id) for task_id in task_ids]
    if read and all(one and int(one[2]) % BLOCK == BLOCK - 1 for one in read):
        return HELDOUT
    holding = [(len(ids), name) for name, ids in own.items() if ids.issuperset(task_ids)]
    smallest = min(holding, default=(0, ""))[0]
    return " or ".join(sorted(name for size, name in holding if size == smallest)) or suite_by_id(task_ids)


def suite_by_id(task_ids: Iterable[str]) -> str:
    """The suite as in the view `evals`."""
    found = {one[1] if (one := _TASK.fullmatch(task_id)) else NO_SUITE for task_id in task_ids}
    return ", ".join(sorted(found))


def own_suites(state: StateDir) -> list[EvalSuite]:
    """The user's suites; an unreadable one is left out."""
    found = [_read_suite(path, stamp) for path, stamp in own_suite_files(state)]
    return [suite for suite in found if suite is not None]


def own_suite_files(state: StateDir) -> list[tuple[Path, tuple[int, int]]]:
    """The files with their modification time and size."""
    found = []
    for path in sorted(state.suites.glob("*.json")):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((path, (stat.st_mtime_ns, stat.st_size)))
    return found


def recorded_suites(state: StateDir) -> dict[str, str]:
    """Suites by evaluation key, from the file names of the suites' reports."""
    found = [_REPORT.fullmatch(path.stem) for path in state.reports.glob("suite-*.html")]
    return {one[2]: one[1] for one in found if one}


@lru_cache(maxsize=64)
def _read_suite(path: Path, stamp: tuple[int, int]) -> EvalSuite | None:
    """`stamp` is part of the cache key: a changed file is read again."""
    try:
        return read_suite_file(path)
    except DatasetError:
        return None


_ALWAYS: Sequence[Callable[[Played], str]] = (
    lambda one: _seeds(one.seeds),
    lambda one: ", ".join(f"T {value:g}" for value in _known(one.temperatures)),
)
_WHERE_THEY_DIFFER: Sequence[Callable[[Played], str]] = (
    lambda one: counted(len(one.task_ids), "task"),
    lambda one: ", ".join(f"{value} turns" for value in _known(one.max_turns)),
    lambda one: ", ".join(_known(one.engines)),
)


def _with_settings(named: Sequence[tuple[EvaluationName, Played]]) -> list[EvaluationName]:
    """The names of one suite, with their settings in words."""
    with_key = [played for name, played in named if name.key]
    parts = [*_ALWAYS, *(part for part in _WHERE_THEY_DIFFER if len({part(one) for one in with_key}) > 1)]
    settings = [
        (" · ".join(filter(None, (part(played) for part in parts))) if name.key else "") or UNKNOWN_SETTINGS
        for name, played in named
    ]
    return [
        replace(name, settings=words if settings.count(words) == 1 else f"{words} · {_began(name.began_at)}")
        for (name, _), words in zip(named, settings, strict=True)
    ]


def _known(values: Iterable[Any]) -> list[Any]:
    return sorted(
        value for value in values if value not in (None, "") and not (isinstance(value, float) and math.isnan(value))
    )


def _seeds(values: Iterable[Any]) -> str:
    known = _known(values)
    return f"seed {known[0]}" if len(known) == 1 else f"{len(known)} seeds" if known else ""


def _began(unix_time: float | None) -> str:
    moment = when(unix_time, to_seconds=True)
    return "begun at an unknown time" if moment == UNKNOWN else f"begun {moment}"
