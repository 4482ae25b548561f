"""Plays back a recorded demonstration: the same actions on a fresh desktop of any screen size, then the task's own
evaluator. Every failure is recorded as an outcome; a fault is never a zero reward."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.actions import ends_episode
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.dialects.coordinates import to_screen
from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.pictures import NO_PICTURE, open_picture
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EvaluatorError,
    NoCapacityError,
    PipelineError,
    ReplicaError,
    SetupError,
    TouchedError,
)
from osworld_pipeline.protocols import Desktop, DesktopInfo
from osworld_pipeline.runs.verify_replay.playback_plan import Playback, PlayedTurn

Result = TypeVar("Result")
NO_INFO = DesktopInfo(replica_id="", provider="", image_digest="", grader_version="")


@dataclass(frozen=True, kw_only=True)
class PlaybackLimits:
    """Seconds."""

    reset_s: float = 600.0
    """Includes the wait for a free replica."""
    actions_s: float = 900.0
    evaluate_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class PlayedBack:
    """Result of one playback."""

    outcome: Outcome
    reward: float | None
    """The grader's score; None if and only if there is none."""
    error: str | None
    """One sentence: the fault, or the action that the desktop refused."""
    num_steps: int
    """Number of executed actions."""
    info: DesktopInfo
    started_at: float
    duration_s: float


class Play(Protocol):
    """Plays one demonstration once, on any desktop. Raises EnvServerError, as `play_back`, and EngineError if no
    rollout actor starts."""

    async def __call__(self, playback: Playback, task: Task, pause_s: float) -> PlayedBack: ...


class _TooLongError(PipelineError):
    """The actions exceeded their time limit."""


_FAULTS = (EvaluatorError, ReplicaError, SetupError, NoCapacityError)
"""Errors of one attempt. A failure of the env server itself is not included: it ends the run."""


async def play_back(
    playback: Playback, task: Task, *, desktop: Desktop, pause_s: float, threshold: float, limits: PlaybackLimits
) -> PlayedBack:
    """Runs one attempt on a desktop that is not reset yet, and closes it. A reward of at least `threshold` is a
    success.

    Raises:
        EnvServerError: the env server is unreachable or returned an invalid answer.
    """
    attempt = _Attempt(playback, desktop, pause_s)
    started_at, start = time.time(), time.monotonic()
    reward = None
    try:
        reward = await attempt.run(task, limits)
        outcome = Outcome.SUCCESS if reward >= threshold else Outcome.FAILURE
        error = attempt.refused
    except (_TooLongError, *_FAULTS) as fault:
        # Tampering is a fault here: it is no verdict on the demonstration.
        faults = {
            _TooLongError: Outcome.TIMEOUT,
            EvaluatorError: Outcome.GRADER_FAULT,
            TouchedError: Outcome.TOUCHED,
        }
        outcome = next((found for kind, found in faults.items() if isinstance(fault, kind)), Outcome.ENV_FAULT)
        error = str(fault) or type(fault).__name__
    finally:
        await desktop.close()
    return PlayedBack(
        outcome=outcome,
        reward=reward,
        error=error,
        num_steps=attempt.num_steps,
        info=attempt.info,
        started_at=started_at,
        duration_s=time.monotonic() - start,
    )


class _Attempt:
    """One playback in progress. Its fields can be read during the playback and after any error."""

    def __init__(self, playback: Playback, desktop: Desktop, pause_s: float) -> None:
        self.num_steps = 0
        self.refused: str | None = None
        self.info = NO_INFO
        self._playback = playback
        self._desktop = desktop
        self._pause_s = pause_s

    async def run(self, task: Task, limits: PlaybackLimits) -> float:
        observation, self.info = await _limited(
            self._desktop.reset(task), limits.reset_s, ReplicaError(f"the reset took longer than {limits.reset_s:g} s")
        )
        screen = observation.screen_size or await asyncio.to_thread(_size_of, observation.screenshot)
        too_long = _TooLongError(f"the {len(self._playback.turns)} actions took longer than {limits.actions_s:g} s")
        await _limited(self._act_all(screen), limits.actions_s, too_long)
        late = EvaluatorError(f"the evaluation took longer than {limits.evaluate_s:g} s")
        return await _limited(self._desktop.score(), limits.evaluate_s, late)

    async def _act_all(self, screen: tuple[int, int]) -> None:
        """Acts until the recorded agent ended the episode or the turns run out. A refused action changes nothing, as in
        the recording, and the next one follows."""
        for index, turn in enumerate(self._playback.turns):
            command = command_on_screen(turn, screen)
            try:
                for part in split_command(command):
                    await self._desktop.act(part, pause_s=self._pause_s)
            except ActionParseError as error:
                self.refused = self.refused or f"the desktop refused action {index}: {error}"
                continue
            self.num_steps += 1
            if ends_episode(turn.arguments):
                return


def command_on_screen(turn: PlayedTurn, screen: tuple[int, int]) -> str:
    """The turn's command, with its points mapped from the original image to a screen of (width, height)."""
    dialect = load_dialect(turn.dialect)
    image = turn.image_size or screen
    return dialect.to_command(
        turn.arguments, partial(to_screen, space=dialect.coordinate_space, image=image, screen=screen)
    )


def _size_of(screenshot: bytes) -> tuple[int, int]:
    try:
        with open_picture(screenshot) as image:
            return image.size
    except NO_PICTURE as error:
        raise ReplicaError(f"a screenshot of {len(screenshot)} bytes is not an image: {error}") from error


async def _limited(awaitable: Awaitable[Result], timeout_s: float, otherwise: PipelineError) -> Result:
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise otherwise from error
