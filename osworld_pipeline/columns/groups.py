"""The columns and rows of rollout groups, injections and verifications."""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from osworld_pipeline.columns.fields import INT32, TEXT, TEXTS, column
from osworld_pipeline.columns.records import Row, clean, columns_of, row_of
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayVerification
from osworld_pipeline.domain.stored import SHARE

_COMPUTED: Sequence[tuple[pa.Field, Callable[[RolloutGroup], Any]]] = (
    (
        column("checkpoint_id", TEXT, "Checkpoint of the episodes: the one being trained."),
        lambda group: group.episodes[0].checkpoint_id if group.episodes else None,
    ),
    (column("num_episodes", INT32, "Siblings, including faults."), lambda group: len(group.episodes)),
    (column("num_valid", INT32, "Valid siblings."), lambda group: len(group.valid_episodes)),
    (
        column("num_successes", INT32, "Siblings that succeeded."),
        lambda group: sum(episode.is_success for episode in group.episodes),
    ),
    (
        column("episode_ids", TEXTS, "The siblings."),
        lambda group: [episode.episode_id for episode in group.episodes],
    ),
    (
        column("outcomes", TEXTS, "Aligned with episode_ids."),
        lambda group: [str(episode.outcome) for episode in group.episodes],
    ),
    (
        column("task_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        lambda group: [episode.reward.task if episode.reward else None for episode in group.episodes],
    ),
    (
        column("shaped_rewards", pa.list_(pa.float64()), "Aligned with episode_ids; NULL for a fault.", SHARE),
        lambda group: [episode.reward.shaped if episode.reward else None for episode in group.episodes],
    ),
    (
        column("replay_row_id", TEXT, "The row of `replay` that joined; NULL if none did."),
        lambda group: group.replay.row_id if group.replay else None,
    ),
    (
        column(
            "oldest_policy_version", INT32, "Number of updates of the oldest weights that sampled one of its turns."
        ),
        lambda group: group.oldest_policy_version,
    ),
)

ROLLOUT_GROUPS = pa.schema([*columns_of(RolloutGroup), *(field for field, _ in _COMPUTED)])
INJECTIONS = pa.schema(
    [
        *columns_of(Injection),
        column("stage_key", TEXT, "As in the group."),
        column("update", INT32, "As in the group."),
    ]
)
REPLAY_VERIFICATIONS = pa.schema(columns_of(ReplayVerification))


def group_row(group: RolloutGroup) -> Row:
    return row_of(group) | {field.name: value(group) for field, value in _COMPUTED}


def injection_row(injection: Injection, group: RolloutGroup | None) -> Row:
    return row_of(injection) | {
        "stage_key": group.stage_key if group else None,
        "update": group.update if group else None,
    }


def verification_row(verification: ReplayVerification) -> Row:
    return clean(row_of(verification))
