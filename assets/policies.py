"""Who answers for an asset, and how long what it last said is taken for current."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import dagster as dg

OWNERS = {
    "raw": "team:data",
    "tables": "team:data",
    "checkpoints": "team:training",
    "evaluation": "team:evaluation",
    "upkeep": "team:data",
}
"""By group; a lab gives these teams its people, in Dagster's UI or here."""

STALE_AFTER = {
    "upkeep": dg.FreshnessPolicy.time_window(warn_window=timedelta(days=7), fail_window=timedelta(days=30)),
    "evaluation": dg.FreshnessPolicy.time_window(warn_window=timedelta(days=14), fail_window=timedelta(days=60)),
}
"""By group. Data and checkpoints do not age: they change when what they are made of changes, which their data versions
tell. A store that is never compacted gets slow, and a leaderboard that is not renewed misses what was trained."""


def under_policies(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    return [asset.map_asset_specs(_under_policies) for asset in assets]


def _under_policies(spec: dg.AssetSpec) -> dg.AssetSpec:
    group = spec.group_name
    assert group in OWNERS, f"{spec.key.to_user_string()} of the group {group} has no owner"
    changed: dict[str, Any] = {"owners": [OWNERS[group]]}
    # Of many partitions only the newest would be looked at.
    if group in STALE_AFTER and spec.partitions_def is None:
        changed["freshness_policy"] = STALE_AFTER[group]
    return spec.replace_attributes(**changed)
