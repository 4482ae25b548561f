"""Records the training tasks' demonstrations on real desktops and writes them as the raw sources of Slime-OSWorld."""

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any

from osworld_pipeline.atomic_io import remove_stale_temps, write_file
from osworld_pipeline.datasets.demonstrations import write_raw_sources
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.section import NOT_LEARNED
from osworld_pipeline.runs.checkpoints.ids import recipe_suite
from osworld_pipeline.runs.job import DesktopJob
from osworld_pipeline.runs.messages import Progress, Report
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.runs.sources.record_demonstrations import Recording, RecordProgress, record

MARKER = "recording.json"
"""Written last: if it exists, the sources are complete and it records their inputs."""


@dataclass(frozen=True, kw_only=True)
class RecordedSources:
    """The content of the marker next to the raw sources."""

    key: str
    suite_digest: str
    num_demonstrations: int
    num_failed: int
    num_attempts: int

    def metadata(self) -> dict[str, Any]:
        return asdict(self)


def main(job: DesktopJob, report: Report) -> dict[str, Any]:
    """Result: the recording's figures."""
    recipe, state = job.recipe, job.state
    suite = recipe_suite(recipe)
    recording = asyncio.run(_record(recipe, state, job.servers, report))
    (state.datasets / MARKER).unlink(missing_ok=True)
    write_raw_sources(
        recording.demonstrations,
        train_tasks=[item.task for item in suite.train],
        heldout_tasks=[item.task for item in suite.heldout],
        state=state,
        seed=recipe.suite.seed,
    )
    sources = RecordedSources(
        key=recording_key(recipe),
        suite_digest=suite.digest,
        num_demonstrations=len(recording.demonstrations),
        num_failed=len(recording.failed),
        num_attempts=recording.num_attempts,
    )
    remove_stale_temps(state.datasets)
    write_file(state.datasets / MARKER, json.dumps(asdict(sources)).encode())
    return asdict(sources)


def read_recording(state: StateDir) -> RecordedSources | None:
    """None if nothing was recorded, or the writing of the sources was interrupted."""
    marker = state.datasets / MARKER
    return RecordedSources(**json.loads(marker.read_text())) if marker.is_file() else None


def recording_key(recipe: Recipe) -> str:
    """Digest of everything that determines the content of a recording."""
    desktop = recipe.desktop.model_dump(
        mode="json", exclude={"pause_s", "settle", *recipe.desktop.keys_with(NOT_LEARNED)}
    )
    agent = recipe.agent.model_dump(mode="json", include={"max_pixels", "a11y_max_length", "system_prompt"})
    return digest_json({"suite": recipe_suite(recipe).digest, "desktop": desktop, "agent": agent})


async def _record(recipe: Recipe, state: StateDir, servers: EnvServers, report: Report) -> Recording:
    def on_progress(progress: RecordProgress) -> None:
        note = f"{progress.num_attempts} attempts, {progress.num_recorded} kept"
        report(Progress(done=progress.num_done, total=progress.num_tasks, note=note))

    async with open_env_client(recipe, state, servers, purpose="demonstrations") as client:
        return await record(
            recipe_suite(recipe).train,
            make_desktop=client.desktop,
            agent=recipe.agent,
            pause_s=recipe.desktop.pause_s,
            num_concurrent=recipe.desktop.num_replicas,
            on_progress=on_progress,
        )
