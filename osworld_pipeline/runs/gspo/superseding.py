"""Rollouts of updates that a resumed stage repeats: they are renamed, marked, and excluded from all counts."""

import re
from collections.abc import Collection
from dataclasses import replace

from osworld_pipeline.columns import Row
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import Episode, EpisodePurpose
from osworld_pipeline.domain.group import GroupStatus
from osworld_pipeline.store import TrajectoryStore

MARK = "superseded"


def supersede(store: TrajectoryStore, checkpoint_id: str, num_updates: int) -> None:
    """Marks the records of the updates after `num_updates`: their groups are rolled out again, perhaps for other
    updates, and no episode may count twice in between. If it is killed, the next call completes it.

    Raises:
        StoreError: the store cannot be read or written.
    """
    prefix = f"{checkpoint_id}-u"
    for part in store.existing_parts("episodes", prefix=prefix):
        number = re.fullmatch(r"\d+", part.removeprefix(prefix))
        if number and int(number[0]) >= num_updates:
            _supersede_part(store, part, num_updates)


def _supersede_part(store: TrajectoryStore, part: str, num_updates: int) -> None:
    episodes = store.read_parts([part]).get(part, ())
    if not episodes:
        return
    # Deterministic, so that a copy whose originals remain after a kill is written again under the same name.
    suffix = f"{MARK}-{digest_json([[one.episode_id, one.started_at] for one in episodes])[:8]}"
    copy = f"{part}-{suffix}"
    reason = f"the stage was resumed after {num_updates} updates, and later groups were rolled out again"
    originals = store.read_group_rows(part)
    # Without originals, the process was killed after writing the copies, or before writing the originals.
    groups = [_marked_group(one, suffix, reason) for one in originals] or store.read_group_rows(copy)
    group_ids = {row["group_id"] for row in groups}
    store.write_episodes(copy, [_marked(one, suffix, group_ids) for one in episodes])
    if originals:
        store.write_group_rows(copy, groups)
        store.write_groups(part, [], [])
    store.write_episodes(part, [])


def _marked(episode: Episode, suffix: str, group_ids: Collection[str]) -> Episode:
    """`group_ids`: of the recorded groups that are marked."""
    group_id = f"{episode.group_id}-{suffix}"
    return replace(
        episode,
        episode_id=f"{episode.episode_id}-{suffix}",
        group_id=group_id if group_id in group_ids else None,
        purpose=EpisodePurpose.SUPERSEDED,
    )


def _marked_group(row: Row, suffix: str, reason: str) -> Row:
    """`replay_row_id` still names the row that joined; its injections no longer count."""
    return row | {
        "group_id": f"{row['group_id']}-{suffix}",
        "episode_ids": [f"{name}-{suffix}" for name in row["episode_ids"]],
        "fate": str(GroupStatus.SUPERSEDED),
        "reason": reason,
    }
