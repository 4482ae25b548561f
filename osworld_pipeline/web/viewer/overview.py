"""Contents of the store for the first page: checkpoints with their training episodes and evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.web.evaluation_names import EvaluationName
from osworld_pipeline.web.viewer.comparing import Evaluated, list_evaluated
from osworld_pipeline.web.viewer.index import Reader


@dataclass(frozen=True, kw_only=True)
class Overview:
    totals: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    """Checkpoints in the order of the stages."""
    evaluations: dict[str, list[Evaluated]]
    """Evaluations by checkpoint, one for each evaluation setting; different settings are not added up."""
    at_work: list[dict[str, Any]]
    """Stages with rollouts and without a final checkpoint: they train now, or were interrupted."""
    others: list[dict[str, Any]]
    """Other policies that are not in the table of checkpoints, mostly of imports."""


def read_overview(reader: Reader, names: Mapping[str, EvaluationName]) -> Overview:
    """`names`: of evaluations, by key."""
    totals = reader.dicts(
        "SELECT count(*) AS num_episodes, count(*) FILTER (purpose = 'train') AS num_train, "
        "count(*) FILTER (purpose = 'evaluate') AS num_evaluate, count(*) FILTER (NOT is_valid) AS num_faults, "
        "count(DISTINCT task_id) AS num_tasks, coalesce(sum(num_steps), 0)::BIGINT AS num_steps, "
        "max(started_at) AS newest_at, (SELECT count(*) FROM grouped) AS num_groups FROM facts"
    )[0]
    rank = " ".join(f"WHEN '{stage}' THEN {place}" for place, stage in enumerate(Stage))
    checkpoints = reader.dicts(
        f"""
        SELECT c.checkpoint_id, c.stage, c.parent_id, c.num_updates, c.run_ids['mlflow'] AS mlflow_run,
               c.run_ids['dagster'] AS dagster_run, coalesce(t.n, 0) AS num_train, coalesce(g.n, 0) AS num_groups
        FROM checkpoints c
        LEFT JOIN (SELECT stage_key, count(*) AS n FROM facts WHERE purpose = 'train' GROUP BY 1) t
            ON t.stage_key = c.checkpoint_id
        LEFT JOIN (SELECT stage_key, count(*) AS n FROM grouped GROUP BY 1) g ON g.stage_key = c.checkpoint_id
        ORDER BY CASE c.stage {rank} ELSE 99 END, c.checkpoint_id
        """  # noqa: S608 - our own names
    )
    unknown = reader.dicts(
        """
        SELECT key, any_value(purpose) AS purpose, any_value(stage) AS stage, count(*) AS n,
               count(*) FILTER (is_success) AS successes, count(*) FILTER (is_valid) AS valid,
               max("update") FILTER (purpose = 'train') AS num_updates, max(started_at) AS newest_at,
               string_agg(DISTINCT nullif(source_dataset, ''), ', ') AS source_dataset
        FROM (
            SELECT *, CASE WHEN purpose = 'train' THEN stage_key ELSE checkpoint_id END AS key FROM facts
            WHERE purpose <> 'superseded'
        )
        WHERE key NOT IN (SELECT checkpoint_id FROM checkpoints) GROUP BY key
        ORDER BY newest_at DESC NULLS LAST, key LIMIT 200
        """
    )
    evaluations: dict[str, list[Evaluated]] = {}
    for one in list_evaluated(reader, names):
        evaluations.setdefault(one.checkpoint_id, []).append(one)
    return Overview(
        totals=totals,
        checkpoints=checkpoints,
        evaluations=evaluations,
        at_work=[one for one in unknown if _is_at_work(one)],
        others=[one for one in unknown if not _is_at_work(one)],
    )


def _is_at_work(policy: Mapping[str, Any]) -> bool:
    return (policy["num_updates"] or 0) > 0 and not policy["source_dataset"]
