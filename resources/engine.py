"""Access to a remote policy engine, whose address is in the recipe."""

import dagster as dg
from pydantic import Field


class EngineResource(dg.ConfigurableResource):
    """Access to the servers of recipe.engine.urls."""

    token: str | None = Field(
        default=None,
        description="Bearer token of sglang servers or of an OpenAI-compatible endpoint; give it as an EnvVar.",
    )
