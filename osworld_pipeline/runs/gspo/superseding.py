"""Rollouts for updates that a resumed stage makes again: they are kept under other names, marked, and count nowhere."""

import re
from collections.abc import Collection
from dataclasses import replace

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import Episode, EpisodePurpose
from osworld_pipeline.domain.group import GroupFate
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.rows import Row

MARK = "superseded"


def supersede(store: TrajectoryStore, checkpoint_id: str, num_updates: int) -> None:
    """Marks what was recorded of the updates after `num_updates`: its groups are rolled out again, perhaps for other
    updates, and no episode may count twice meanwhile. Killed in between, it goes on from there when called again.

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
    # The same for the same rollouts, so that a copy whose originals a kill has left is written again, not twice.
    suffix = f"{MARK}-{digest_json([[one.episode_id, one.started_at] for one in episodes])[:8]}"
    copy = f"{part}-{suffix}"
    reason = f"the stage was resumed after {num_updates} updates, and what came after them was rolled out again"
    originals = store.read_group_rows(part)
    # Without originals a kill came after their copies were written, or before they themselves were.
    groups = [_marked_group(one, suffix, reason) for one in originals] or store.read_group_rows(copy)
    group_ids = {row["group_id"] for row in groups}
    store.write_episodes(copy, [_marked(one, suffix, group_ids) for one in episodes])
    if originals:
        store.write_group_rows(copy, groups)
        store.write_groups(part, [], [])
    store.write_episodes(part, [])


def _marked(episode: Episode, suffix: str, group_ids: Collection[str]) -> Episode:
    """`group_ids`: of the marked groups that are on record."""
    group_id = f"{episode.group_id}-{suffix}"
    return replace(
        episode,
        episode_id=f"{episode.episode_id}-{suffix}",
        group_id=group_id if group_id in group_ids else None,
        purpose=EpisodePurpose.SUPERSEDED,
    )


def _marked_group(row: Row, suffix: str, reason: str) -> Row:
    """What joined it stays named in `replay_row_id`; its injections count no more."""
    return row | {
        "group_id": f"{row['group_id']}-{suffix}",
        "episode_ids": [f"{name}-{suffix}" for name in row["episode_ids"]],
        "fate": str(GroupFate.SUPERSEDED),
        "reason": reason,
    }
