"""Explains from its plan why a query is slow, and what to query instead."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from osworld_pipeline.columns import EPISODES, PART_TABLES, STEPS

SLOW_S = 5.0
"""A query that takes longer is explained."""
MANY_PARTS = 500
MANY_PAIRS = 10_000_000
TOKEN_LISTS = ("token_ids", "response_mask", "sampled_logprobs", "policy_versions")
_ONLY_IN_STEPS = frozenset(STEPS.names) - frozenset(EPISODES.names)
_PAIRWISE = frozenset({"CROSS_PRODUCT", "NESTED_LOOP_JOIN", "BLOCKWISE_NL_JOIN"})
_LINKS = ("lineage", "made_from", "licences")


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A table's files in a plan."""

    columns: frozenset[str]
    filters: str
    """The filters of the scan."""
    num_rows: int
    """DuckDB's estimate of the rows."""

    @property
    def is_of_steps(self) -> bool:
        return bool(self.columns & _ONLY_IN_STEPS)

    @property
    def is_of_chosen_episodes(self) -> bool:
        return "episode_id" in self.filters


def slow_reasons(connection: duckdb.DuckDBPyConnection, sql: str, *, compact: str) -> list[str]:
    """One sentence for each reason in the plan, with the remedy; if there is none, one that says how to investigate.
    Plans the query without running it.

    Raises:
        duckdb.Error: the query cannot be planned.
    """
    (plan,) = connection.execute(f"EXPLAIN (FORMAT json) {sql}").fetchall()
    nodes = list(_nodes(json.loads(plan[1])))
    scans = [_scan(node, above) for node, above in nodes if node["name"].strip() == "READ_PARQUET"]
    asked = _asked(connection, sql)
    reasons = [
        *_reads_all_steps(scans, asked.views),
        *_reads_token_lists(scans, asked.views),
        *_lists_every_link(asked),
        *_pairs_rows([node for node, _ in nodes]),
        *_opens_small_parts(connection, compact),
    ]
    return reasons or ["its plan shows no reason: EXPLAIN ANALYZE before the query shows how the time is spent"]


def _reads_all_steps(scans: Sequence[Scan], views: frozenset[str]) -> Iterator[str]:
    """Reports a scan of all steps. A filter on the episodes of a join also filters its steps at run time."""
    whole = [scan for scan in scans if scan.is_of_steps]
    if any(scan.is_of_chosen_episodes for scan in scans):
        return
    wide = sorted(views & {"evals", "lineage"})
    if "steps" in views:
        yield (
            f"it reads all steps{_about(whole)}: add a condition on steps.episode_id, such as `episode_id IN (...)` or "
            "`episode_id = ...`; token counts and times are columns of `episodes` (prompt_tokens, response_tokens, "
            "times_s), so a query of these needs no steps"
        )
    elif whole and wide:
        yield (
            f"`{wide[0]}` reads all steps{_about(whole)} here: query `episodes` WHERE purpose = 'evaluate', which has "
            "outcome, reward, times_s, prompt_tokens and response_tokens itself"
        )


def _reads_token_lists(scans: Sequence[Scan], views: frozenset[str]) -> Iterator[str]:
    read = [name for name in TOKEN_LISTS if any(name in scan.columns for scan in scans)]
    if read and "sequences" in views and not any(scan.is_of_chosen_episodes for scan in scans):
        yield (
            f"it reads the token lists of all episodes ({', '.join(read)}): choose episodes by episode_id; "
            "mean_logprob, prompt_tokens and response_tokens are columns of `episodes`"
        )


def _lists_every_link(asked: "_Asked") -> Iterator[str]:
    views = sorted(asked.views & set(_LINKS))
    if views and not asked.conditions & {"checkpoint_id", "episode_id", "source_id"}:
        key = "episode_id or checkpoint_id" if views[0] == "lineage" else "checkpoint_id"
        yield f"`{views[0]}` has a row for each link of every checkpoint: add a WHERE on {key}"


def _pairs_rows(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for node in nodes:
        num_pairs = 1
        for child in node["children"]:
            num_pairs *= max(1, _cardinality(child))
        if node["name"].strip() in _PAIRWISE and num_pairs >= MANY_PAIRS:
            yield (
                f"it compares every row of one side with every row of the other (about {num_pairs:,} pairs): join by "
                "equal columns, as JOIN ... USING (episode_id)"
            )
            return


def _opens_small_parts(connection: duckdb.DuckDBPyConnection, compact: str) -> Iterator[str]:
    counts = ", ".join(f"len(getvariable('osworld_{table}_small'))" for table in PART_TABLES)
    rows = connection.execute(f"SELECT greatest({counts})").fetchall()
    if (rows[0][0] or 0) >= MANY_PARTS:
        yield (
            f"the store has {rows[0][0]:,} small parts, and a query opens each: `{compact}` makes few large files of "
            "them"
        )


def _about(scans: Sequence[Scan]) -> str:
    num_rows = sum(scan.num_rows for scan in scans)
    return f" (about {num_rows:,})" if num_rows else ""


def _nodes(
    nodes: Sequence[Mapping[str, Any]], above: Mapping[str, Any] | None = None
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Each node with its parent."""
    for node in nodes:
        yield node, above
        yield from _nodes(node["children"], node)


def _scan(node: Mapping[str, Any], above: Mapping[str, Any] | None) -> Scan:
    info = node["extra_info"]
    columns = info.get("Projections") or []
    filters = [info.get("Filters"), (above or {}).get("extra_info", {}).get("Expression")]
    return Scan(
        columns=frozenset([columns] if isinstance(columns, str) else columns),
        filters=" ".join(str(one) for one in filters if one),
        num_rows=_cardinality(node),
    )


def _cardinality(node: Mapping[str, Any]) -> int:
    text = str(node["extra_info"].get("Estimated Cardinality", "0"))
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Names in the text of the query."""

    views: frozenset[str]
    """Relations after FROM and JOIN."""
    conditions: frozenset[str]
    """Columns after WHERE."""


def _asked(connection: duckdb.DuckDBPyConnection, sql: str) -> _Asked:
    (tree,) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()
    views: set[str] = set()
    conditions: set[str] = set()

    def look(node: Any, *, is_condition: bool) -> None:
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE":
                views.add(str(node.get("table_name", "")).lower())
            if is_condition and node.get("type") == "COLUMN_REF":
                conditions.add(str(node["column_names"][-1]).lower())
            for key, value in node.items():
                look(value, is_condition=is_condition or key == "where_clause")
        elif isinstance(node, list):
            for value in node:
                look(value, is_condition=is_condition)

    look(json.loads(tree[0]), is_condition=False)
    return _Asked(views=frozenset(views), conditions=frozenset(conditions))
