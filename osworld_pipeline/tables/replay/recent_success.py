"""Recent success of the tasks, from the recorded groups of a training stage and of its ancestors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from osworld_pipeline.domain.checkpoint import Ancestor
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.part_views import create_pinned_views
from osworld_pipeline.tables.replay.history import BEFORE, NEWEST_FIRST, NOT_HELD, before

_RECENT = f"""
WITH last_groups AS (
    SELECT task_id, num_valid, num_successes FROM rollout_groups
    WHERE num_valid > 0 AND {NOT_HELD} AND {BEFORE}
    QUALIFY row_number() OVER (PARTITION BY task_id ORDER BY {NEWEST_FIRST}, group_id DESC) <= $num_groups
)
SELECT task_id, sum(num_valid)::INT, sum(num_successes)::INT FROM last_groups GROUP BY task_id
"""  # noqa: S608 - our own words


@dataclass(frozen=True, kw_only=True)
class RecentEpisodes:
    """Episodes of a task's last groups, without faults."""

    num_valid: int = 0
    num_successes: int = 0


def recent_success(
    state: StateDir, *, stage_key: str, lineage: Sequence[Ancestor], update: int, num_groups: int
) -> Mapping[str, RecentEpisodes]:
    """The recent episodes of each task, over its last `num_groups` groups: those of the stage's updates before
    `update`, then those of the stages in `lineage`, the nearest first. A task without a valid episode is absent.

    Raises:
        TableError: the tables cannot be read.
        StoreError: the store's manifest is damaged, or the state has a newer format or must be migrated first.
    """
    asked = before(stage_key, update, lineage) | {"num_groups": num_groups}
    try:
        with duckdb.connect(":memory:") as views:
            create_pinned_views(views, state, "rollout_groups")
            rows = views.execute(_RECENT, asked).fetchall()
    except duckdb.Error as error:
        raise TableError(f"cannot read the recorded groups of {state.root}: {first_line(error)}") from error
    return {task_id: RecentEpisodes(num_valid=valid, num_successes=successes) for task_id, valid, successes in rows}
