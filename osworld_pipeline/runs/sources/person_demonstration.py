"""A demonstration by a person: a desktop is set up for a task, each input that the person sends on the env server's
page becomes a step, and the task's own grader scores the end."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.datasets.importers.calls import Pointer, actions_of, read_code
from osworld_pipeline.datasets.importers.turns import describe
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, EnvServerError
from osworld_pipeline.evaluation.suites import needs_wine
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.http_desktop import HttpDesktop
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers, ServerSpec, embedded_env_server
from osworld_pipeline.runs.rollouts.env_servers import open_env_client
from osworld_pipeline.runs.sources.demonstration_recorder import DemonstrationRecorder

POLL_S = 20.0
MAX_STEPS = 200
SHOWN_S = 4.0
"""How long the desktop stays after grading, so that the page shows the reward."""


class NotEndedError(EnvServerError):
    """The person did not end the demonstration within its limits; nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A demonstration that was graded, successful or not."""

    demonstration: Demonstration
    episode_id: str
    server: str
    info: DesktopInfo
    started_at: float

    def provenance(self, person: str) -> dict[str, Any]:
        return {
            "source": "person",
            "person": person,
            "episode_id": self.episode_id,
            "server": self.server,
            "provider": self.info.provider,
            "image_digest": self.info.image_digest,
            "grader_version": self.info.grader_version,
            "started_at": self.started_at,
        }


@contextmanager
def desktops_for_a_person(
    state: StateDir, recipe: Recipe, urls: tuple[str, ...], token: str | None
) -> Iterator[EnvServers]:
    """These env servers, or an embedded one with one desktop that accepts a person's input."""
    if urls:
        yield EnvServers(urls=urls, token=token, num_replicas=1)
        return
    desktop = recipe.desktop
    spec = ServerSpec(
        state=state,
        num_replicas=1,
        screen_width=desktop.screen_width,
        screen_height=desktop.screen_height,
        has_wine=needs_wine(recipe.suite.name),
        allow_takeover=True,
    )
    with embedded_env_server(spec) as servers:
        yield servers


async def play_by_person(
    task: Task,
    *,
    recipe: Recipe,
    state: StateDir,
    servers: EnvServers,
    limit_s: float,
    on_page: Callable[[str], None],
    on_step: Callable[[str], None],
) -> Played:
    """`on_page` gets the address of the page, `on_step` a sentence about each input.

    Raises:
        EnvServerError: no server answers, or it takes no input of a person.
        NotEndedError: the time or the number of steps is used up.
        SetupError, ReplicaError, EvaluatorError, NoCapacityError: there is no desktop, or no grade.
    """
    started_at = time.time()
    async with open_env_client(recipe, state, servers, purpose="demonstrate") as client:
        desktop = client.desktop()
        try:
            _, info = await desktop.reset(task)
            await desktop.next_input(0, wait_s=0)
            on_page(desktop.page_url)
            player = _Player(desktop, DemonstrationRecorder(task, recipe.agent), recipe, on_step)
            try:
                async with asyncio.timeout(limit_s):
                    await player.play()
            except TimeoutError as error:
                raise NotEndedError(f"the demonstration was not ended within {limit_s:g} s; nothing is kept") from error
            reward = await desktop.score()
            played = Played(
                demonstration=player.recorder.finish(reward),
                episode_id=desktop.episode_id,
                server=desktop.base_url,
                info=info,
                started_at=started_at,
            )
            await asyncio.sleep(SHOWN_S)
            return played
        finally:
            await desktop.close()


class _Player:
    """Executes the person's inputs as numbered steps of the client."""

    def __init__(
        self, desktop: HttpDesktop, recorder: DemonstrationRecorder, recipe: Recipe, on_step: Callable[[str], None]
    ) -> None:
        self.recorder = recorder
        self._desktop, self._recipe, self._on_step = desktop, recipe, on_step
        self._pointer, self._number = Pointer(), 0

    async def play(self) -> None:
        """Runs until the person ends the demonstration."""
        while self.recorder.num_turns < MAX_STEPS:
            found = await self._desktop.next_input(self._number, wait_s=POLL_S)
            if not found.number:
                continue
            self._number = found.number
            try:
                actions = actions_of(read_code(found.action), self._on_screen, self._pointer)
            except ActionParseError as error:
                self._on_step(f"not executed: {error}")
                continue
            for arguments in actions:
                await self._step(arguments)
            if actions[-1]["action"] == "terminate":
                return
        raise NotEndedError(f"the demonstration was not ended within {MAX_STEPS} steps; nothing is kept")

    async def _step(self, arguments: Any) -> None:
        # A new look: the person acts on the screen as it is now, not as it was after the last step.
        description = describe(arguments)
        command = await self.recorder.add(await self._desktop.look(), arguments, description=description)
        await self._desktop.act(command, pause_s=self._recipe.desktop.pause_s, note=description)
        self._on_step(f"step {self.recorder.num_turns}: {description}")

    def _on_screen(self, x: float, y: float) -> tuple[int, int]:
        width, height = self._recipe.desktop.screen_width, self._recipe.desktop.screen_height
        if not (0 <= x < width and 0 <= y < height):
            raise ActionParseError(f"the point ({x:g}, {y:g}) is not on the screen of {width}x{height}")
        return round(x), round(y)
