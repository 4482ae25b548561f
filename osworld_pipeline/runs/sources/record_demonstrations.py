"""Runs the suite's oracles on real desktops. The episodes that the grader scores as solved are kept as demonstrations,
in the form that DemonstrationRecorder gives them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from osworld_pipeline.runs.sources.demonstration_recorder import DemonstrationRecorder

SOLVED = 1.0
MAX_ATTEMPTS = 3
EPISODE_TIMEOUT_S = 180.0
MAX_FAILED_SHARE = 0.1
"""A larger share of tasks without a demonstration points to the desktops, not to a task."""

FAULTS = (ReplicaError, SetupError, EvaluatorError, NoCapacityError, TimeoutError)
"""Errors that another attempt may resolve. A failed env server is not among them."""


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
    """The demonstrations in task order."""
    failed: tuple[FailedRecording, ...]
    num_attempts: int


async def play_episode(
    task: Task, steps: Sequence[OracleStep], *, desktop: Desktop, agent: AgentSection, pause_s: float
) -> Demonstration:
    """Runs one episode of scripted steps on a desktop that is not reset yet, and returns it with its reward. Closes the
    desktop."""
    recorder = DemonstrationRecorder(task, agent)
    try:
        observation, _ = await desktop.reset(task)
        for step in steps:
            command = await recorder.add(observation, step.arguments, description=step.description)
            observation = await desktop.act(command, pause_s=pause_s)
        return recorder.finish(await desktop.score())
    finally:
        await desktop.close()


async def record(
    tasks: Sequence[SuiteTask],
    *,
    make_desktop: Callable[[], Desktop],
    agent: AgentSection,
    pause_s: float,
    num_concurrent: int,
    on_progress: Callable[[RecordProgress], None] | None = None,
) -> Recording:
    """Records a demonstration of every task, at most `num_concurrent` in parallel. An attempt with a fault or without
    success is repeated on a fresh desktop, each time with longer pauses in case the machine is busy.

    Raises:
        DatasetError: more than a tenth of the tasks could not be demonstrated; quotes the first.
        EnvServerError: the env server is unreachable.
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
        # The group has cancelled the other episodes; the first error is the cause.
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
