"""Contribution of replay to a training: the groups that a replay row joined, and the later success of their
tasks."""

from collections.abc import Collection
from dataclasses import dataclass

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.questions.cookbook import find_question

_OF_STAGES = """
WITH episodes AS (SELECT * FROM episodes WHERE list_contains($stages, stage_key)),
     injections AS (SELECT * FROM injections WHERE list_contains($stages, stage_key))
SELECT (SELECT count(*) FROM rollout_groups
        WHERE list_contains($stages, stage_key) AND coalesce(fate, '') <> 'superseded'),
       (SELECT count(DISTINCT group_id) FROM injections), (SELECT count(DISTINCT task_id) FROM injections),
       (SELECT count(*) FROM ({solved_later}))
"""


@dataclass(frozen=True, kw_only=True)
class ReplayShare:
    num_groups: int
    num_injected: int
    """Groups that a replay row joined: a demonstration or an online success."""
    num_tasks: int
    """Tasks of these groups."""
    num_solved_later: int
    """Of these tasks, those whose first success in training came after the first such group had ended. Replay rows do
    not affect the episodes of their group: a row joins when the group is trained on."""


def read_replay_share(state: StateDir, stage_keys: Collection[str]) -> ReplayShare:
    """The contribution to the given training stages. Raises TableError."""
    sql = _OF_STAGES.format(solved_later=find_question("solved-only-with-replay").sql)
    with fresh_views(state, "episodes", "rollout_groups", "injections") as connection:
        found = connection.execute(sql, {"stages": list(stage_keys)}).fetchone()
    assert found is not None, "counts are always one row"
    num_groups, num_injected, num_tasks, num_solved_later = found
    return ReplayShare(
        num_groups=num_groups, num_injected=num_injected, num_tasks=num_tasks, num_solved_later=num_solved_later
    )
