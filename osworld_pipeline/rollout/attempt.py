"""One attempt at an episode on one replica: reset, turns, grade. Errors go through it; run_episode gives them names."""

import asyncio
import time
from dataclasses import replace
from enum import StrEnum

from osworld_pipeline.agent.dialects import Dialect, ParsedTurn
from osworld_pipeline.agent.images import ModelImage, prepare_screenshot
from osworld_pipeline.agent.observation_text import LastAction, observation_text, system_message, user_message
from osworld_pipeline.agent.renderer import AppendContext, Renderer
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
from osworld_pipeline.protocols import Desktop, DesktopInfo, EpisodeSink, GenerateRequest, GenerateResult, PolicyEngine
from osworld_pipeline.recipes.schema import AgentSection
from osworld_pipeline.rollout.signals import step_signals


class Stop(StrEnum):
    """Why the turns ended."""

    TERMINATED = "terminated"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"


class LimitReachedError(PipelineError):
    """A turn or the episode took longer than it may."""


def derive_seed(*parts: object) -> int:
    """A seed below 2**31 that depends on nothing but these parts."""
    return int(digest_bytes("/".join(map(str, parts)).encode())[:8], 16) & 0x7FFF_FFFF


class Attempt:
    """Mutable while it runs; read its steps, context, times and desktop_info afterwards, however it ended."""

    def __init__(
        self,
        task: Task,
        desktop: Desktop,
        *,
        engine: PolicyEngine,
        renderer: Renderer,
        sink: EpisodeSink,
        dialect: Dialect,
        agent: AgentSection,
        sampling: SamplingParams,
        pause_s: float,
        diff_threshold: float,
    ) -> None:
        self.steps: list[Step] = []
        self.context: AppendContext | None = None
        self.desktop_info: DesktopInfo | None = None
        self.times_s: dict[str, float] = {"reset": 0.0, "model": 0.0, "step": 0.0, "evaluate": 0.0}
        self._task = task
        self._desktop = desktop
        self._engine = engine
        self._renderer = renderer
        self._sink = sink
        self._dialect = dialect
        self._agent = agent
        self._sampling = sampling
        self._pause_s = pause_s
        self._diff_threshold = diff_threshold
        self._observation: Observation | None = None
        self._last_action: LastAction | None = None

    async def reset(self) -> None:
        started = time.monotonic()
        try:
            self._observation, self.desktop_info = await self._desktop.reset(self._task)
        finally:
            self.times_s["reset"] = time.monotonic() - started

    async def operate(self, *, max_turns: int, episode_timeout_s: float, turn_timeout_s: float) -> Stop:
        """Turns until the policy terminates or a limit ends them.

        Raises:
            LimitReachedError: a time limit.
        """
        try:
            async with asyncio.timeout(episode_timeout_s):
                for step_index in range(max_turns):
                    stop = await self._limited_turn(step_index, turn_timeout_s)
                    if stop is not None:
                        return stop
        except TimeoutError as error:
            raise LimitReachedError(f"the episode took longer than {episode_timeout_s:g} s") from error
        return Stop.TURN_LIMIT

    async def score(self) -> float:
        started = time.monotonic()
        try:
            return await self._desktop.score()
        finally:
            self.times_s["evaluate"] = time.monotonic() - started

    async def close(self) -> None:
        await self._desktop.close()

    async def _limited_turn(self, step_index: int, turn_timeout_s: float) -> Stop | None:
        try:
            async with asyncio.timeout(turn_timeout_s):
                return await self._turn(step_index)
        except TimeoutError as error:
            raise LimitReachedError(f"turn {step_index} took longer than {turn_timeout_s:g} s") from error

    async def _turn(self, step_index: int) -> Stop | None:
        before = self._observation
        assert before is not None, "reset comes first"
        image = await asyncio.to_thread(self._store_image, before)
        text = observation_text(
            before,
            self._task,
            step_index=step_index,
            last_action=self._last_action,
            a11y_max_length=self._agent.a11y_max_length,
        )
        if not self._add_to_context(text, image):
            return Stop.CONTEXT_LIMIT
        prompt_num_tokens = self._context.num_tokens
        started = time.monotonic()
        try:
            result = await self._sample(step_index)
        finally:
            model_s = time.monotonic() - started
            self.times_s["model"] += model_s
        turn = self._dialect.parse(result.text)
        command = None if turn.arguments is None else self._dialect.to_command(turn.arguments, image.to_screen)
        started = time.monotonic()
        after, error, fault = await self._act(turn, command, before)
        step_s = time.monotonic() - started
        self.times_s["step"] += step_s
        signals = await asyncio.to_thread(
            step_signals,
            turn,
            before,
            after,
            executed=error is None,
            error=error,
            diff_threshold=self._diff_threshold,
        )
        self.steps.append(
            Step(
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
                signals=signals,
                policy_version=result.policy_version,
                prompt_num_tokens=prompt_num_tokens,
                response_num_tokens=len(result.token_ids),
                model_s=model_s,
                step_s=step_s,
            )
        )
        if fault is not None:
            raise fault
        self._observation = after
        self._last_action = LastAction(error=error)
        return Stop.TERMINATED if error is None and command in ("DONE", "FAIL") else None

    @property
    def _context(self) -> AppendContext:
        assert self.context is not None, "the first observation opens the context"
        return self.context

    def _store_image(self, observation: Observation) -> ModelImage:
        try:
            image = prepare_screenshot(observation.screenshot, self._agent.max_pixels)
        except ValueError as error:
            raise ReplicaError(str(error)) from error
        self._sink.write_blob(image.data, suffix=f".{image.format}")
        return image

    def _add_to_context(self, text: str, image: ModelImage) -> bool:
        """False where the observation and a whole response would not fit any more; nothing is added then."""
        is_first = self.context is None
        if self.context is None:
            prompt = system_message(self._dialect.system_prompt(self._agent.system_prompt))
            self.context = AppendContext(self._renderer, prompt)
        message = user_message(text)
        ids = self.context.observation_ids(message, width=image.width, height=image.height)
        needed = self.context.num_tokens + len(ids) + self._sampling.max_new_tokens
        if needed > self._agent.max_context_tokens:
            if is_first:
                raise RecipeError(
                    f"task {self._task.task_id}: the first turn needs {needed} tokens, response included; "
                    f"raise agent.max_context_tokens ({self._agent.max_context_tokens}) or lower agent.max_pixels"
                )
            return False
        self.context.add_observation(message, image.data, width=image.width, height=image.height)
        return True

    async def _sample(self, step_index: int) -> GenerateResult:
        """One response, its ids appended as sampled. Each turn has a seed of its own."""
        result = await self._engine.generate(
            GenerateRequest(
                token_ids=self._context.token_ids,
                images=self._context.images,
                sampling=replace(self._sampling, seed=derive_seed(self._sampling.seed, step_index)),
            )
        )
        try:
            self._context.add_response(result.token_ids, result.logprobs)
        except ValueError as error:
            raise EngineError(f"turn {step_index} of task {self._task.task_id}: {error}") from error
        return result

    async def _act(
        self, turn: ParsedTurn, command: str | None, before: Observation
    ) -> tuple[Observation, str | None, PipelineError | None]:
        """The observation after, why nothing ran where nothing did, and the fault that ends the episode if one does.

        A response that cannot be read, or that the desktop refuses, changes nothing: the model sees the same screen
        again and is told why.
        """
        if command is None:
            return before, turn.error or "no action found in the response", None
        try:
            return await self._desktop.act(command, pause_s=self._pause_s), None, None
        except ActionParseError as error:
            return before, str(error), None
        except (EnvServerError, ReplicaError) as error:
            return before, str(error), error
