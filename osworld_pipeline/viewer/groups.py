"""A rollout group as it was trained: its siblings with their advantages, and the replay rows that joined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import orjson

from osworld_pipeline.tables.views import NAMED_TASKS
from osworld_pipeline.training.advantage import Estimator, compute_advantages
from osworld_pipeline.viewer.index import Reader
from osworld_pipeline.viewer.settings import NotFoundError

GROUPS_PAGE = 100
DEFAULT_ESTIMATOR: Estimator = "mean_std"


@dataclass(frozen=True, kw_only=True)
class Sibling:
    row: Mapping[str, Any]
    """Row of `facts`."""
    advantage: float | None
    """None for a fault, and if the group was not trained on."""


@dataclass(frozen=True, kw_only=True)
class GroupView:
    row: Mapping[str, Any]
    siblings: tuple[Sibling, ...]
    injections: tuple[Mapping[str, Any], ...]
    estimator: Estimator
    num_missing: int
    """Siblings that the group names and the store does not have."""

    @property
    def advantages(self) -> dict[str, float]:
        """By episode, for those with an advantage."""
        return {one.row["episode_id"]: one.advantage for one in self.siblings if one.advantage is not None}


def read_group(reader: Reader, group_id: str) -> GroupView:
    """
    Raises:
        NotFoundError: no group and no episode has this group id.
    """
    rows = reader.dicts(
        "SELECT *, (SELECT any_value(recipe) FROM checkpoints c WHERE c.checkpoint_id = grouped.stage_key) AS recipe "
        "FROM grouped WHERE group_id = ? LIMIT 1",
        [group_id],
    )
    episodes = reader.dicts("SELECT * FROM facts WHERE group_id = ? ORDER BY seed, attempt, episode_id", [group_id])
    if not rows and not episodes:
        raise NotFoundError(f"there is no rollout group '{group_id}'")
    row = rows[0] if rows else _unfinished(group_id, episodes)
    order = {name: place for place, name in enumerate(row["episode_ids"] or [])}
    episodes.sort(key=lambda episode: order.get(episode["episode_id"], len(order)))
    injections = reader.dicts("SELECT * FROM injected WHERE group_id = ? ORDER BY row_id", [group_id])
    estimator = estimator_of(row["recipe"])
    is_trained = (row["fate"] or "trained") == "trained" and bool(rows)
    advantages = advantages_of(episodes, [one["reward"] for one in injections], estimator) if is_trained else {}
    return GroupView(
        row=row,
        siblings=tuple(Sibling(row=episode, advantage=advantages.get(episode["episode_id"])) for episode in episodes),
        injections=tuple(injections),
        estimator=estimator,
        num_missing=len(set(order) - {episode["episode_id"] for episode in episodes}),
    )


def advantages_of(
    episodes: Sequence[Mapping[str, Any]], replay_rewards: Sequence[float], estimator: Estimator
) -> dict[str, float]:
    """By episode, as `training.advantage.group_advantages`: over the shaped rewards of the valid ones and one
    replay row as one more sample."""
    valid = [episode for episode in episodes if episode["is_valid"] and episode["shaped_reward"] is not None]
    rewards = [*(episode["shaped_reward"] for episode in valid), *replay_rewards[:1]]
    return dict(zip([episode["episode_id"] for episode in valid], compute_advantages(rewards, estimator), strict=False))


def estimator_of(recipe: str | None) -> Estimator:
    """Estimator of the stage's recipe (JSON); the default if it is not stored, as while the stage trains."""
    try:
        named = (orjson.loads(recipe or "{}").get("gspo") or {}).get("advantage")
    except (orjson.JSONDecodeError, AttributeError):
        named = None
    known: Mapping[str, Estimator] = {name: name for name in get_args(Estimator)}
    return known.get(str(named), DEFAULT_ESTIMATOR)


def list_groups(
    reader: Reader, *, run: str = "", mlflow: str = "", fate: str = "", task: str = "", page: int = 1
) -> tuple[list[dict[str, Any]], int]:
    """Groups of one page, the newest update first, and their total number. `mlflow`: only groups whose episodes were
    played in that run."""
    terms, values = ["true"], []
    for column, value in (("stage_key", run), ("task_id", task), ("coalesce(fate, 'trained')", fate)):
        if value:
            terms.append(f"{column} = ?")
            values.append(value)
    if mlflow:
        terms.append("group_id IN (SELECT group_id FROM facts WHERE mlflow_run = ?)")
        values.append(mlflow)
    condition = " AND ".join(terms)
    rows = reader.dicts(
        "SELECT g.*, t.instruction, list_min(g.shaped_rewards) AS lowest, list_max(g.shaped_rewards) AS highest "  # noqa: S608
        f"FROM (SELECT * FROM grouped WHERE {condition}) g LEFT JOIN ({NAMED_TASKS}) t "
        "ON t.task_id = g.task_id AND t.is_only "
        f'ORDER BY g.stage_key DESC, g."update" DESC, g.group_id LIMIT {GROUPS_PAGE} OFFSET {GROUPS_PAGE * (page - 1)}',
        values,
    )
    total = reader.rows(f"SELECT count(*) FROM grouped WHERE {condition}", values)[0][0]  # noqa: S608 - our own names
    return rows, total


def _unfinished(group_id: str, episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A group without its own row, because its update is not finished."""
    first = episodes[0]
    return {
        "group_id": group_id,
        "task_id": first["task_id"],
        "checkpoint_id": first["checkpoint_id"],
        "stage_key": first["stage_key"],
        "update": first["update"],
        "num_episodes": len(episodes),
        "num_valid": sum(bool(episode["is_valid"]) for episode in episodes),
        "num_successes": sum(bool(episode["is_success"]) for episode in episodes),
        "episode_ids": None,
        "replay_row_id": None,
        "fate": "",
        "reason": "its update is not finished, or the group was never completed",
        "oldest_policy_version": None,
        "recipe": None,
    }
