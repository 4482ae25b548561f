"""The keys of the assets. The code locations of one Dagster instance share the keys of assets, so a team that has an
asset `evaluations` of its own, or two deployments in one instance, give ours a prefix."""

import os
import re
from collections.abc import Mapping

import dagster as dg

from osworld_pipeline.errors import PipelineError

PREFIX_VARIABLE = "OSWORLD_ASSET_PREFIX"
_PART = re.compile(r"[A-Za-z0-9_]+")


def prefix_from(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of all keys before the name: `team/agents` gives ("team", "agents"); none without the variable.

    Raises:
        PipelineError: a part is not made of letters, digits and `_`.
    """
    text = environment.get(PREFIX_VARIABLE, "").strip("/")
    parts = tuple(text.split("/")) if text else ()
    for part in parts:
        if not _PART.fullmatch(part):
            raise PipelineError(
                f"{PREFIX_VARIABLE}={text} is no prefix of asset keys: write names of letters, digits and '_', "
                "separated by '/', for example agents or team/agents"
            )
    return parts


PREFIX = prefix_from(os.environ)
"""Read at import, because the decorators of the assets need it."""


def key_of(name: str) -> dg.AssetKey:
    """The key of one of our assets."""
    return dg.AssetKey([*PREFIX, name])
