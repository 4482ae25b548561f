"""A rollout group as it was trained: its siblings with their advantages, and the replay rows that joined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.tables.views import NAMED_TASKS
from osworld_pipeline.web.viewer.index import Reader
from osworld_pipeline.web.viewer.settings import NotFoundError

GROUPS_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class GroupView:
    row: Mapping[str, Any]
    siblings: tuple[Mapping[str, Any], ...]
    """Rows of `facts`."""
    injections: tuple[Mapping[str, Any], ...]
    num_missing: int
    """Siblings that the group names and the store does not have."""

    @property
    def advantages(self) -> dict[str, float]:
        """Advantages by episode, for those with an advantage."""
        return {one["episode_id"]: one["advantage"] for one in self.siblings if one["advantage"] is not None}


def read_group(reader: Reader, group_id: str) -> GroupView:
    """
    Raises:
        NotFoundError: no group and no episode has this group id.
    """
    rows = reader.dicts("SELECT * FROM grouped WHERE group_id = ? LIMIT 1", [group_id])
    episodes = reader.dicts("SELECT * FROM facts WHERE group_id = ? ORDER BY seed, attempt, episode_id", [group_id])
    if not rows and not episodes:
        raise NotFoundError(f"there is no rollout group '{group_id}'")
    row = rows[0] if rows else _unfinished(group_id, episodes)
    order = {name: place for place, name in enumerate(row["episode_ids"] or [])}
    episodes.sort(key=lambda episode: order.get(episode["episode_id"], len(order)))
    injections = reader.dicts("SELECT * FROM injected WHERE group_id = ? ORDER BY row_id", [group_id])
    return GroupView(
        row=row,
        siblings=tuple(episodes),
        injections=tuple(injections),
        num_missing=len(set(order) - {episode["episode_id"] for episode in episodes}),
    )


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
    }
