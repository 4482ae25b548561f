"""Drives the suite's oracles on real desktops and keeps what the grader calls solved as demonstrations, in the very
form a rollout has: the same screenshots and observation text, in the dialect in which demonstrations are stored."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.agent.dialects import STORED_DIALECT, load_dialect
from osworld_pipeline.agent.images import ModelImage, prepare_screenshot
from osworld_pipeline.agent.observation_text import (
    LastAction,
    assistant_message,
    observation_text,
    system_message,
    user_message,
)
from osworld_pipeline.datasets.demonstrations import Demonstration
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    DatasetError,
    EvaluatorError,
    NoCapacityError,
    ReplicaError,
    SetupError,
)
from osworld_pipeline.evaluation.suites import OracleStep, SuiteTask
from osworld_pipeline.protocols import Desktop
from osworld_pipeline.recipes.schema import AgentSection

SOLVED = 1.0
MAX_ATTEMPTS = 3
EPISODE_TIMEOUT_S = 180.0
MAX_FAILED_SHARE = 0.1
"""Above this share of tasks without a demonstration, something is wrong with the desktops and not with a task."""

FAULTS = (ReplicaError, SetupError, EvaluatorError, NoCapacityError, TimeoutError)
"""What another attempt may cure. An env server that is gone is not among them."""


@dataclass(frozen=True, kw_only=True)
class RecordProgress:
    num_done: int
    num_tasks: int
    num_recorded: int
    num_attempts: int
    task_id: str


@dataclass(frozen=True, kw_only=True)
class FailedRecording:
    task_id: str
    error: str
    """One sentence: the last fault, or that the oracle did not solve the task."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    demonstrations: tuple[Demonstration, ...]
    """In the order of the tasks."""
    failed: tuple[FailedRecording, ...]
    num_attempts: int


async def play_episode(
    task: Task, steps: Sequence[OracleStep], *, desktop: Desktop, agent: AgentSection, pause_s: float
) -> Demonstration:
    """One episode of scripted steps on a desktop not reset yet, with the reward it earned. Closes the desktop."""
    dialect = load_dialect(STORED_DIALECT)
    messages: list[dict[str, Any]] = []
    images: list[bytes] = []
    try:
        observation, _ = await desktop.reset(task)
        for index, step in enumerate(steps):
            image = await asyncio.to_thread(
                prepare_screenshot, observation.screenshot, agent.max_pixels, screen_size=observation.screen_size
            )
            if not messages:
                messages.append(system_message(dialect.system_prompt(agent.system_prompt)))
            text = observation_text(
                observation,
                task,
                step_index=index,
                last_action=LastAction() if index else None,
                a11y_max_length=agent.a11y_max_length,
            )
            arguments = arguments_on_image(step, image)
            messages += [user_message(text), assistant_message(dialect.format(step.description, arguments))]
            images.append(image.data)
            observation = await desktop.act(dialect.to_command(arguments, image.to_screen), pause_s=pause_s)
        reward = await desktop.score()
    finally:
        await desktop.close()
    return Demonstration(task_id=task.task_id, messages=tuple(messages), images=tuple(images), reward=reward)


def arguments_on_image(step: OracleStep, image: ModelImage) -> dict[str, Any]:
    """The step's tool-call arguments, its points moved from the screen to the image the model sees."""
    arguments = dict(step.arguments)
    for key in ("coordinate", "end_coordinate"):
        if key in arguments:
            arguments[key] = list(image.from_screen(*arguments[key]))
    return arguments


async def record(
    tasks: Sequence[SuiteTask],
    *,
    make_desktop: Callable[[], Desktop],
    agent: AgentSection,
    pause_s: float,
    num_concurrent: int,
    on_progress: Callable[[RecordProgress], None] | None = None,
) -> Recording:
    """A demonstration of every task, at most `num_concurrent` at a time. An attempt that ends in a fault or unsolved is
    made again on a fresh desktop, each time with longer pauses for a busy machine.

    Raises:
        DatasetError: more than a tenth of the tasks could not be demonstrated; quotes the first.
        EnvServerError: the env server is gone.
    """
    slots = asyncio.Semaphore(num_concurrent)
    results: list[Demonstration | FailedRecording | None] = [None] * len(tasks)
    num_attempts = 0

    async def record_one(index: int, item: SuiteTask) -> None:
        nonlocal num_attempts
        async with slots:
            for attempt in range(MAX_ATTEMPTS):
                num_attempts += 1
                results[index] = await _attempt(item, make_desktop(), agent=agent, pause_s=pause_s * (attempt + 1))
                if isinstance(results[index], Demonstration):
                    break
        if on_progress is not None:
            done = [entry for entry in results if entry is not None]
            on_progress(
                RecordProgress(
                    num_done=len(done),
                    num_tasks=len(tasks),
                    num_recorded=sum(isinstance(entry, Demonstration) for entry in done),
                    num_attempts=num_attempts,
                    task_id=item.task.task_id,
                )
            )

    try:
        async with asyncio.TaskGroup() as group:
            for index, item in enumerate(tasks):
                group.create_task(record_one(index, item))
    except ExceptionGroup as errors:
        # The group has ended the other episodes; the first error is the one that says why.
        raise errors.exceptions[0] from errors
    failed = tuple(entry for entry in results if isinstance(entry, FailedRecording))
    if len(failed) > MAX_FAILED_SHARE * len(tasks):
        raise DatasetError(
            f"{len(failed)} of {len(tasks)} tasks could not be demonstrated; {failed[0].task_id}: {failed[0].error}"
        )
    demonstrations = tuple(entry for entry in results if isinstance(entry, Demonstration))
    return Recording(demonstrations=demonstrations, failed=failed, num_attempts=num_attempts)


async def _attempt(
    item: SuiteTask, desktop: Desktop, *, agent: AgentSection, pause_s: float
) -> Demonstration | FailedRecording:
    task_id = item.task.task_id
    try:
        async with asyncio.timeout(EPISODE_TIMEOUT_S):
            demonstration = await play_episode(item.task, item.oracle, desktop=desktop, agent=agent, pause_s=pause_s)
    except TimeoutError:
        return FailedRecording(task_id=task_id, error=f"the episode took more than {EPISODE_TIMEOUT_S:g} s")
    except FAULTS as error:
        return FailedRecording(task_id=task_id, error=str(error))
    if demonstration.reward < SOLVED:
        return FailedRecording(
            task_id=task_id, error=f"the oracle ended with reward {demonstration.reward:g} instead of {SOLVED:g}"
        )
    return demonstration
