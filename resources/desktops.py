"""Desktops for assets: remote env servers by URL, or the embedded one."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.suites import needs_wine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.rollouts.embedded_server import (
    EnvServers,
    ServerSpec,
    embedded_env_server,
    embedded_identity,
)


class DesktopsResource(dg.ConfigurableResource):
    """Env servers that provide desktops. Without URLs, here or in the recipe (desktop.server_urls), one with local
    desktops runs while an asset needs it."""

    urls: list[str] = Field(
        default_factory=list, description="Base URLs of env servers; they override the recipe's desktop.server_urls."
    )
    token: str | None = Field(default=None, description="Bearer token of the remote servers; give it as an EnvVar.")

    def identity(self, recipe: Recipe) -> str | None:
        """Digest of the embedded desktops and graders; None for remote ones, which must be queried."""
        return None if self.urls or recipe.desktop.server_urls else embedded_identity()

    @contextmanager
    def serve(self, state: StateDir, recipe: Recipe) -> Iterator[EnvServers]:
        desktop = recipe.desktop
        urls = tuple(self.urls) or desktop.server_urls
        if urls:
            yield EnvServers(urls=urls, token=self.token, num_replicas=desktop.num_replicas)
            return
        spec = ServerSpec(
            state=state,
            num_replicas=desktop.num_replicas,
            screen_width=desktop.screen_width,
            screen_height=desktop.screen_height,
            has_wine=needs_wine(recipe.suite.name),
        )
        with embedded_env_server(spec) as servers:
            yield servers
