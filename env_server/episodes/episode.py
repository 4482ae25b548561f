"""One episode on one leased desktop. Its calls run one at a time, a step that is sent twice is executed once, and a
desktop that dies during a call ends the lease at once, so that its replacement does not wait for the client."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Literal

from env_server.driving.driver import EpisodeDriver, Plan, View
from env_server.episodes.outcomes import EpisodeOutcome, RecordingError, StepOrderError, StepResult
from env_server.episodes.person import MAX_WAITING, InputQueue, PersonInputError, check_input, touched_sentence
from env_server.replicas.replica import Lease
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.errors import (
    EvaluatorError,
    ReplicaError,
    SetupError,
    TamperingError,
    TouchedError,
)
from osworld_pipeline.wire import ImageFormat

INPUT_PAUSE_S = 0.3
"""How long the screen may settle after a person's input, before the picture for viewers is taken."""

OnTiming = Callable[[str, float], None]
"""Called with a part of a call and its seconds: reset, act (including its pause), observe, evaluate, encode."""


class Episode:
    def __init__(
        self,
        *,
        episode_id: str,
        plan: Plan,
        lease: Lease,
        view: View,
        client_id: str = "",
        on_timing: OnTiming = lambda part, seconds: None,
    ) -> None:
        self.episode_id = episode_id
        self.client_id = client_id
        self.plan = plan
        self.view = view
        self.replica_id = lease.replica_id
        self.num_steps = 0
        self.last_action: str | None = None
        self.record_id = ""
        """The id under which the client stores the episode; empty if it sent none."""
        self.num_person_inputs = 0
        """Inputs that a person sent outside the client's steps: above 0 the episode is touched."""
        self.last_input = ""
        """The last of them since the last step."""
        self.demonstration: InputQueue | None = None
        """The person's inputs that the client executes as its steps; None if the episode is no demonstration."""
        self.note = ""
        """What the client said about the last step, for people who watch."""
        self.reward: float | None = None
        """The reward of the last evaluation; None before one, and after a further step."""
        self.opened_at = self.last_used_at = self.prepared_at = time.monotonic()
        self.idle_ttl_s: float | None = None
        """The idle limit of this episode, if its client set one."""
        self._fault: Literal["env_fault", "grader_fault", "tampering"] | None = None
        self._has_acted = False
        """Before the policy's first action, only the task's set-up can have broken the desktop."""
        self._lease, self._on_timing = lease, on_timing
        self._driver: EpisodeDriver = plan.drive(lease.desktop)
        self._observation: Observation | None = None
        self._last_step: StepResult | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        """Inputs of a person that wait for the lock or are being executed."""

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    @property
    def observation(self) -> Observation:
        """The last observation, without a request to the desktop."""
        self.touch()
        assert self._observation is not None, "an episode is in the table only after prepare"
        return self._observation

    @property
    def last_seen(self) -> Observation | None:
        """The last observation, for a viewer: reading it does not count as use of the episode. None before the set-up
        is done."""
        return self._observation

    def touch(self) -> None:
        """Records that the client is active."""
        self.last_used_at = time.monotonic()

    def outcome(self, otherwise: EpisodeOutcome) -> EpisodeOutcome:
        """The first that applies: touched by a person, evaluated, ended by a fault; else `otherwise`."""
        if self.num_person_inputs:
            return "touched"
        if self.reward is not None:
            return "evaluated"
        return self._fault or ("env_fault" if self._lease.failure is not None else otherwise)

    async def prepare(self) -> Observation:
        """Runs the task's set-up on the fresh desktop and observes it when the screen is still.

        Raises:
            SetupError: a verb failed, or all of them took too long.
            ReplicaError: the desktop died.
        """
        async with self._using():
            with self._timed("reset"):
                await self._driver.prepare()
            observation = await self._look(self.view)
        self.prepared_at = self.last_used_at
        return observation

    async def step(
        self,
        action: str,
        *,
        pause_s: float,
        settle: Settle = "fixed",
        number: int | None = None,
        view: View | None = None,
        note: str = "",
    ) -> StepResult:
        """`number`, counted from 1, makes a step safe to send again: the last step is answered as before and not
        executed a second time.

        Raises:
            StepOrderError: `number` is neither the next nor the last, or the last step was another action.
            ActionParseError: the action was refused; nothing was executed, and it does not count as a step.
            ReplicaError: the desktop died.
        """
        action = action.strip()
        async with self._lock:
            repeated = self._find_repeated(action, number)
            if repeated is not None:
                self.touch()
                return repeated
            async with self._live():
                self._has_acted, self.note = True, note
                with self._timed("act"):
                    await self._driver.act(action, pause_s=pause_s, settle=settle)
                self.last_action, self.last_input, self.reward = action, "", None
                self.num_steps += 1
                observation = await self._look(view or self.view)
                self._last_step = StepResult(
                    observation=observation,
                    num_steps=self.num_steps,
                    action=action,
                    num_person_inputs=self.num_person_inputs,
                )
                return self._last_step

    async def person_input(self, action: str) -> None:
        """Executes a person's input and marks the episode as touched, even if the execution fails. In a demonstration,
        queues the input for the client instead.

        Raises:
            ActionParseError: the input was refused; nothing was executed or marked.
            PersonInputError: the episode is graded, the demonstration has ended, or too many inputs wait.
            ReplicaError: the desktop died.
        """
        action = check_input(action, is_demonstration=self.demonstration is not None)
        if self.demonstration is not None:
            self.touch()
            self.demonstration.add(action)
            return
        if self._num_waiting >= MAX_WAITING:
            raise PersonInputError(f"{MAX_WAITING} inputs of a person wait for the desktop of this episode already")
        self._num_waiting += 1
        try:
            async with self._using():
                await self._execute_input(action)
        finally:
            self._num_waiting -= 1

    async def next_person_input(self, after: int, *, wait_s: float) -> tuple[int, str] | None:
        """The number and the action of the person's first input after number `after`; None if none comes in time. Makes
        the episode a demonstration."""
        if self.demonstration is None:
            self.demonstration = InputQueue()
        self.touch()
        try:
            return await self.demonstration.after(after, wait_s=wait_s)
        finally:
            self.touch()

    async def look(self, view: View | None = None) -> Observation:
        """Takes a new observation, which replaces the last one. ReplicaError: the desktop died."""
        async with self._using():
            return await self._look(view or self.view)

    async def screenshot(self, image_format: ImageFormat, quality: int | None) -> Observation:
        """Takes a new screenshot only; the last observation does not change. ReplicaError: the desktop died."""
        async with self._using():
            return await self._driver.observe(View(image_format=image_format, image_quality=quality))

    async def evaluate(self) -> float:
        """The grader's reward in 0..1; graded once for the same last step, so that the call may be repeated after a
        lost answer.

        Raises:
            EvaluatorError: the grader crashed, or took too long.
            ReplicaError: the desktop died.
        """
        async with self._lock:
            if self.reward is not None:  # also if the desktop died later: this episode is evaluated
                self.touch()
                return self.reward
            async with self._live():
                with self._timed("evaluate"):
                    self.reward = await self._driver.evaluate(last_action=self.last_action)
            return self.reward

    async def own_reward(self) -> float:
        """Does the same as evaluate, for clients that train on every reward.

        Raises:
            TouchedError: a person sent input, so the reward is not the policy's own.
        """
        reward = await self.evaluate()
        if self.num_person_inputs:
            raise TouchedError(touched_sentence(self.num_person_inputs), self.num_person_inputs)
        return reward

    async def start_recording(self) -> None:
        """RecordingError: the desktop cannot record, or already records. ReplicaError: the desktop died."""
        async with self._using():
            try:
                await self._lease.desktop.guest.start_recording()
            except SetupError as error:
                raise RecordingError(str(error)) from error

    async def end_recording(self) -> bytes:
        """Returns the video, an MP4. RecordingError: there is none. ReplicaError: the desktop died."""
        async with self._using():
            try:
                return await self._lease.desktop.guest.end_recording()
            except SetupError as error:
                raise RecordingError(str(error)) from error

    async def close(self) -> None:
        if self.demonstration is not None:
            self.demonstration.end()
        await self._driver.close()

    async def _execute_input(self, action: str) -> None:
        if self.reward is not None:
            raise PersonInputError(f"episode {self.episode_id} is graded: its reward must stay the policy's own")
        self.num_person_inputs, self.last_input, self._has_acted = self.num_person_inputs + 1, action, True
        await self._driver.act(action, pause_s=INPUT_PAUSE_S, settle="adaptive")
        await self._look(self.view)

    def _find_repeated(self, action: str, number: int | None) -> StepResult | None:
        if number is None or number == self.num_steps + 1:
            return None
        last = self._last_step
        is_last = last is not None and number == last.num_steps == self.num_steps
        if not is_last and self._lease.is_over:
            return None  # the desktop died before the step was answered; the caller gets that error
        if last is None or not is_last:
            raise StepOrderError(
                f"episode {self.episode_id} has done {self.num_steps} steps, so the next is {self.num_steps + 1}, "
                f"not {number}"
            )
        if last.action != action:
            raise StepOrderError(
                f"step {number} of episode {self.episode_id} was another action; the next is {self.num_steps + 1}"
            )
        return replace(last, is_repeated=True)

    async def _look(self, view: View) -> Observation:
        with self._timed("observe"):
            self._observation = await self._driver.observe(view)
        return self._observation

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._on_timing(part, time.perf_counter() - start)

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        async with self._lock, self._live():
            yield

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        """Checks that the desktop is available, and records its errors. The caller holds the lock."""
        self.last_used_at = time.monotonic()
        try:
            if self._lease.is_over:
                raise ReplicaError(self._lease.failure or f"episode {self.episode_id} is closed")
            yield
        except ReplicaError as error:
            cause = await self._cause_inside(error) if self._has_acted else None
            self._lease.fail(cause or str(error))
            if self.num_person_inputs:
                raise TouchedError(
                    f"the desktop was lost after a person's input: {cause or error}", self.num_person_inputs
                ) from error
            self._fault = "env_fault" if cause is None else "tampering"
            raise (ReplicaError(str(error)) if cause is None else TamperingError(cause)) from error
        except SetupError:
            self._fault = "env_fault"
            raise
        except EvaluatorError:
            self._fault = "grader_fault"
            raise
        finally:
            self.last_used_at = time.monotonic()

    async def _cause_inside(self, error: ReplicaError) -> str | None:
        """How the policy's programs disabled the desktop; None if the cause is outside."""
        desktop = self._lease.desktop
        find = getattr(desktop, "cause_inside", None)  # other providers cannot report a cause
        cause = None if find is None else await find()
        is_reported = isinstance(error, TamperingError) and desktop.is_alive()
        is_reported = is_reported and not getattr(desktop, "host_lacked_memory", False)
        return cause or (str(error) if is_reported else None)
