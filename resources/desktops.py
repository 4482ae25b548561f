"""Desktops for assets: remote env servers by URL, env servers on Ray, or the embedded one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.evaluation.suites import needs_wine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.placement import RayDesktops, RayResources
from osworld_pipeline.runs.rollouts.embedded_server import (
    EnvServers,
    ServerSpec,
    embedded_env_server,
    embedded_identity,
)
from osworld_pipeline.wire.run_tokens import make_run_token

VIEWER_VARIABLE = "OSWORLD_VIEWER_URL"


class DesktopsOnRay(dg.Config):
    """Env servers that run on the Ray cluster of `launcher.runs_on.ray` as long as the program that uses them, as many
    as `desktop.num_replicas` needs. A server that ends, or whose node is lost, is restarted if there is room."""

    provider: str = Field(default="local", description="Kind of desktop: a provider of `env-server`.")
    desktops_per_server: int = Field(default=8, ge=1, description="Desktops of one env server.")
    cpus_per_desktop: float = Field(default=0.0, ge=0, description="CPUs of one desktop, as counted by Ray.")
    memory_gb_per_desktop: float = Field(
        default=0.0, ge=0, description="GiB of memory of one desktop; 0 reserves none."
    )
    resources_per_desktop: dict[str, float] = Field(
        default={"desktop": 1.0},
        description="Further resources of one desktop. A node for 32: `ray start --resources='{\"desktop\": 32}'`.",
    )
    folder: str = Field(
        default="~/.cache/osworld-pipeline/desktops", description="Images and replicas on each node; some GB."
    )
    options: list[str] = Field(default=[], description="Further options of `env-server`, such as [--config, FILE].")
    ready_timeout_s: float = Field(
        default=900.0, gt=0, description="Seconds a server may take to start; the very first start may build the image."
    )

    def of(self, recipe: Recipe, viewer_url: str = "") -> RayDesktops:
        """The desktops of one program. The last server may have fewer desktops than the others. `viewer_url`: where
        their pages link to stored episodes."""
        desktop, per_server = recipe.desktop, self.desktops_per_server
        whole, rest = divmod(desktop.num_replicas, per_server)
        return RayDesktops(
            sizes=(per_server,) * whole + ((rest,) if rest else ()),
            per_desktop=RayResources(
                cpus=self.cpus_per_desktop, memory_gb=self.memory_gb_per_desktop, custom=self.resources_per_desktop
            ),
            folder=self.folder,
            options=(
                *("--provider", self.provider),
                *("--screen-size", f"{desktop.screen_width}x{desktop.screen_height}"),
                *(["--viewer-url", viewer_url] if viewer_url else []),
                *(["--wine"] if self.provider == "local" and needs_wine(recipe.suite.name) else []),
                *self.options,
            ),
            ready_timeout_s=self.ready_timeout_s,
        )


class DesktopsResource(dg.ConfigurableResource):
    """Env servers that provide desktops. Without URLs, here or in the recipe (desktop.server_urls), and without `ray`,
    one with local desktops runs while an asset needs it."""

    urls: list[str] = Field(
        default_factory=list, description="Base URLs of env servers; they override the recipe's desktop.server_urls."
    )
    token: str | None = Field(
        default=None,
        description="Bearer token of the remote servers, or of those on Ray (without it each program has its own); "
        "give it as an EnvVar.",
    )
    token_hours: float = Field(
        default=168.0,
        ge=0,
        description="Lifetime of the token that the programs of a step get instead of `token`, for servers by URL. "
        "When it expires, the step is repeated and resumes. 0: they get `token` itself, as older servers and foreign "
        "proxies need.",
    )
    ray: DesktopsOnRay | None = Field(
        default=None, description="Desktops that the program starts on its Ray cluster, instead of `urls`."
    )

    def identity(self, recipe: Recipe) -> str | None:
        """Digest of the embedded desktops and graders; None for remote ones, which must be queried."""
        return None if self.ray or self.urls or recipe.desktop.server_urls else embedded_identity()

    def _run_token(self, run_id: str) -> str | None:
        if not self.token or not self.token_hours:
            return self.token
        return make_run_token(self.token, run=run_id, ends_at=time.time() + 3600 * self.token_hours)

    @contextmanager
    def serve(self, state: StateDir, recipe: Recipe, *, run_id: str) -> Iterator[EnvServers]:
        """`run_id`: Dagster's, for the token of the run."""
        desktop = recipe.desktop
        urls = tuple(self.urls) or desktop.server_urls
        if self.ray is not None:
            if urls:
                raise RecipeError(
                    f"desktops are given twice, by URL ({', '.join(urls)}) and by desktops.ray: remove one of them"
                )
            on_ray = self.ray.of(recipe, dg.EnvVar(VIEWER_VARIABLE).get_value() or "")
            yield EnvServers(urls=(), token=self.token, num_replicas=desktop.num_replicas, on_ray=on_ray)
            return
        if urls:
            yield EnvServers(urls=urls, token=self._run_token(run_id), num_replicas=desktop.num_replicas)
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
