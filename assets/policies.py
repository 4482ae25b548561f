"""Owners and freshness policies of the assets."""

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
"""Owners by group; assign people to these teams in Dagster's UI or here."""

STALE_AFTER = {
    "upkeep": dg.FreshnessPolicy.time_window(warn_window=timedelta(days=7), fail_window=timedelta(days=30)),
    "evaluation": dg.FreshnessPolicy.time_window(warn_window=timedelta(days=14), fail_window=timedelta(days=60)),
}
"""Freshness policies by group. Data and checkpoints have none: they change only when their inputs change, which their
data versions show. A store without compaction becomes slow, and an old leaderboard lacks new checkpoints."""


def under_policies(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    return [asset.map_asset_specs(_under_policies) for asset in assets]


def _under_policies(spec: dg.AssetSpec) -> dg.AssetSpec:
    group = spec.group_name
    assert group in OWNERS, f"{spec.key.to_user_string()} of the group {group} has no owner"
    changed: dict[str, Any] = {"owners": [OWNERS[group]]}
    # For a partitioned asset only the newest partition would be checked.
    if group in STALE_AFTER and spec.partitions_def is None:
        changed["freshness_policy"] = STALE_AFTER[group]
    return spec.replace_attributes(**changed)
