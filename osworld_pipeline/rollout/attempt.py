"""One attempt at an episode on one replica: reset, turns, grade. It raises errors; run_episode maps them to
outcomes."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial

from osworld_pipeline.agent.context import EpisodeContext, open_context
from osworld_pipeline.agent.images import ModelImage, prepare_screenshot
from osworld_pipeline.agent.observation_text import LastAction, observation_text
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import Dialect, ParsedTurn
from osworld_pipeline.dialects.actions import ends_episode
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.episode import SamplingParams, Step
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EngineError,
    EnvServerError,
    PipelineError,
    RecipeError,
    ReplicaError,
)
from osworld_pipeline.protocols import Desktop, DesktopInfo, EpisodeSink, GenerateResult, PolicyEngine
from osworld_pipeline.recipes.schema import AgentSection
from osworld_pipeline.rollout.signals import step_signals
from osworld_pipeline.wire.tracing import span


class Stop(StrEnum):
    """Why the turns ended."""

    TERMINATED = "terminated"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"


class LimitReachedError(PipelineError):
    """A turn or the episode exceeded its time limit."""


def derive_seed(*parts: object) -> int:
    """A seed below 2**31 that depends only on these parts."""
    return int(digest_bytes("/".join(map(str, parts)).encode())[:8], 16) & 0x7FFF_FFFF


class Attempt:
    """Mutable while it runs; its steps, context, times, desktop_info and num_person_inputs are read after any kind of
    end."""

    def __init__(
        self,
        task: Task,
        desktop: Desktop,
        *,
        engine: PolicyEngine,
        renderer: Renderer | None,
        sink: EpisodeSink,
        dialect: Dialect,
        agent: AgentSection,
        sampling: SamplingParams,
        episode_id: str,
        record_id: str = "",
        pause_s: float,
        diff_threshold: float,
    ) -> None:
        self.steps: list[Step] = []
        self.context: EpisodeContext = open_context(
            agent,
            renderer,
            dialect.system_prompt(agent.system_prompt),
            max_new_tokens=sampling.max_new_tokens,
            uses_chat_api=engine.uses_chat_api,
        )
        self.desktop_info: DesktopInfo | None = None
        self.num_person_inputs = 0
        self.times_s: dict[str, float] = {"reset": 0.0, "model": 0.0, "step": 0.0, "evaluate": 0.0}
        self._task = task
        self._desktop = desktop
        self._engine = engine
        self._sink = sink
        self.dialect = dialect
        self._agent = agent
        self._sampling = sampling
        self._episode_id, self._record_id = episode_id, record_id
        self._pause_s = pause_s
        self._diff_threshold = diff_threshold
        self._observation: Observation | None = None
        self._measuring: asyncio.Task[Step] | None = None
        """The last step while its signals are being measured; the next turn does not wait for it."""
        self._last_action: LastAction | None = None

    async def reset(self) -> None:
        started = time.monotonic()
        try:
            with span("reset"):
                self._observation, self.desktop_info = await self._desktop.reset(self._task, record_id=self._record_id)
        finally:
            self.times_s["reset"] = time.monotonic() - started

    async def run_turns(self, *, max_turns: int, episode_timeout_s: float, turn_timeout_s: float) -> Stop:
        """Runs turns until the policy terminates or a limit ends them.

        Raises:
            LimitReachedError: a time limit was exceeded.
            RecipeError: the first turn does not fit the context.
            EngineError, EnvServerError, ReplicaError, StoreError: the engine, the desktop or the store failed.
        """
        try:
            async with asyncio.timeout(episode_timeout_s):
                for step_index in range(max_turns):
                    stop = await self._limited_turn(step_index, turn_timeout_s)
                    if stop is not None:
                        return stop
        except TimeoutError as error:
            raise LimitReachedError(f"the episode took longer than {episode_timeout_s:g} s") from error
        finally:
            await self._finish_step()
        return Stop.TURN_LIMIT

    async def score(self) -> float:
        started = time.monotonic()
        try:
            with span("evaluate"):
                return await self._desktop.score()
        finally:
            self.times_s["evaluate"] = time.monotonic() - started

    async def close(self) -> None:
        try:
            with span("close"):
                await self._desktop.close()
        finally:
            await self._engine.forget(self._episode_id)

    async def _limited_turn(self, step_index: int, turn_timeout_s: float) -> Stop | None:
        try:
            async with asyncio.timeout(turn_timeout_s):
                with span("turn", number=step_index):
                    return await self._turn(step_index)
        except TimeoutError as error:
            raise LimitReachedError(f"turn {step_index} took longer than {turn_timeout_s:g} s") from error

    async def _turn(self, step_index: int) -> Stop | None:
        before = self._observation
        assert before is not None, "call reset first"
        image = await asyncio.to_thread(self._prepare_image, before)
        text = observation_text(
            before,
            self._task,
            step_index=step_index,
            last_action=self._last_action,
            a11y_max_length=self._agent.a11y_max_length,
        )
        if not self._add_to_context(text, image, is_first=step_index == 0):
            return Stop.CONTEXT_LIMIT
        prompt_num_tokens = self.context.num_prompt_tokens
        # Stores the image and computes signals in threads while the model generates.
        storing = asyncio.ensure_future(asyncio.to_thread(self._store_image, image))
        started = time.monotonic()
        try:
            with span("generate", engine=self._engine.name):
                result = await self._sample(step_index)
        finally:
            model_s = time.monotonic() - started
            self.times_s["model"] += model_s
            await asyncio.shield(storing)
        await self._finish_step()
        turn = self.dialect.parse(result.text)
        command = None
        if turn.arguments is not None:
            scale = partial(image.to_screen, space=self.dialect.coordinate_space)
            command = self.dialect.to_command(turn.arguments, scale)
        started = time.monotonic()
        with span("step"):
            after, error, fault = await self._act(turn, command, before, note=result.text)
        step_s = time.monotonic() - started
        self.times_s["step"] += step_s
        step = partial(
            Step,
            step_index=step_index,
            screenshot_sha256=image.sha256,
            screenshot_width=image.width,
            screenshot_height=image.height,
            screenshot_format=image.format,
            screenshot_num_bytes=len(image.data),
            observation_text=text,
            response_text=result.text,
            action=turn.arguments,
            command=command,
            policy_version=result.policy_version,
            prompt_num_tokens=prompt_num_tokens,
            response_num_tokens=len(result.token_ids),
            model_s=model_s,
            step_s=step_s,
        )
        self._measuring = asyncio.create_task(self._measure(step, turn, before, after, error))
        if fault is not None:
            raise fault
        self._observation = after
        self.num_person_inputs = max(self.num_person_inputs, after.num_person_inputs)
        self._last_action = LastAction(error=error)
        ended = error is None and turn.arguments is not None and ends_episode(turn.arguments)
        return Stop.TERMINATED if ended else None

    async def _measure(
        self, step: Callable[..., Step], turn: ParsedTurn, before: Observation, after: Observation, error: str | None
    ) -> Step:
        """Raises ReplicaError if the desktop sent invalid image data."""
        signals = await asyncio.to_thread(
            step_signals,
            turn,
            before,
            after,
            executed=error is None,
            error=error,
            diff_threshold=self._diff_threshold,
        )
        return step(signals=signals)

    async def _finish_step(self) -> None:
        """Adds the step that is being measured, if any. Raises as `_measure`."""
        if self._measuring is not None:
            step = await asyncio.shield(self._measuring)
            self._measuring = None
            self.steps.append(step)

    def _prepare_image(self, observation: Observation) -> ModelImage:
        try:
            return prepare_screenshot(
                observation.screenshot, self._agent.max_pixels, screen_size=observation.screen_size
            )
        except ValueError as error:
            raise ReplicaError(str(error)) from error

    def _store_image(self, image: ModelImage) -> None:
        self._sink.write_blob(image.data, suffix=f".{image.format}")

    def _add_to_context(self, text: str, image: ModelImage, *, is_first: bool) -> bool:
        """Returns False, without adding anything, if the observation and a full response would not fit."""
        excess = self.context.add_observation(text, image)
        if excess is not None and is_first:
            raise RecipeError(
                f"task {self._task.task_id}: the first turn, response included, is {excess} tokens longer than the "
                f"context; raise agent.max_context_tokens ({self._agent.max_context_tokens}) or lower agent.max_pixels"
            )
        return excess is None

    async def _sample(self, step_index: int) -> GenerateResult:
        """Samples one response and appends its ids as sampled. Each turn has its own seed."""
        sampling = replace(self._sampling, seed=derive_seed(self._sampling.seed, step_index))
        result = await self._engine.generate(self.context.request(sampling, episode_id=self._episode_id))
        try:
            self.context.add_response(result)
        except ValueError as error:
            raise EngineError(f"turn {step_index} of task {self._task.task_id}: {error}") from error
        return result

    async def _act(
        self, turn: ParsedTurn, command: str | None, before: Observation, *, note: str
    ) -> tuple[Observation, str | None, PipelineError | None]:
        """Returns the next observation, the reason if no action ran, and the fault that ends the episode, if any.

        A response that cannot be parsed, or that the desktop refuses, changes nothing: the model sees the same screen
        again with the reason.
        """
        if command is None:
            return before, turn.error or "no action found in the response", None
        try:
            after = before
            for part in split_command(command):
                after = await self._desktop.act(part, pause_s=self._pause_s, note=note)
            return after, None, None
        except ActionParseError as error:
            return before, str(error), None
        except (EnvServerError, ReplicaError) as error:
            return before, str(error), error
