"""The seam between an episode and whatever carries it out: our own guest protocol, or OSWorld's DesktopEnv whole.

An Episode counts steps, keeps order and remembers answers; its driver touches the desktop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from env_server.providers.base import ProvidedDesktop
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.task import Task
from osworld_pipeline.wire import EnvConfig, ImageFormat


@dataclass(frozen=True, kw_only=True)
class View:
    """What an observation is to hold, and how its screenshot is encoded."""

    image_format: ImageFormat = "png"
    image_quality: int | None = None
    """1..100 for the lossy formats; None is the guest's own choice."""
    image_size: tuple[int, int] | None = None
    """(width, height); None is the screen's own."""
    with_accessibility_tree: bool = False
    with_terminal: bool = False

    @classmethod
    def of(cls, config: EnvConfig) -> "View":
        return cls(
            image_format=config.image_format,
            image_quality=config.image_quality,
            image_size=config.image_size,
            with_accessibility_tree=config.require_a11y_tree,
            with_terminal=config.require_terminal,
        )


class EpisodeDriver(Protocol):
    """Carries one task out on one desktop; its calls come one at a time. A ReplicaError from any of them means that
    the desktop is lost."""

    async def prepare(self) -> None:
        """The task's set-up on the fresh desktop; returns when it stands still.

        Raises:
            SetupError: it could not be set up, or not in time.
            ReplicaError: the desktop died.
        """
        ...

    async def act(self, action: str, *, pause_s: float, settle: Settle) -> None:
        """One stripped action, or WAIT, DONE or FAIL; then the screen gets `pause_s` seconds to settle, or fewer where
        `settle` is adaptive and it has settled sooner. A WAIT itself takes `pause_s` either way.

        Raises:
            ActionParseError: the action was refused and nothing has happened.
            ReplicaError: the desktop died.
        """
        ...

    async def observe(self, view: View) -> Observation: ...

    async def evaluate(self, *, last_action: str | None) -> float:
        """The grader's reward in 0..1.

        Raises:
            EvaluatorError: the grader crashed, or took too long.
            ReplicaError: the desktop died.
        """
        ...

    async def close(self) -> None:
        """Gives back what the driver itself took; the desktop is somebody else's. Idempotent."""
        ...


class Plan(Protocol):
    """A task as this server will carry it out; everything about it that can be refused has been."""

    @property
    def task(self) -> Task: ...

    def drive(self, desktop: ProvidedDesktop) -> EpisodeDriver: ...


class Drivers(Protocol):
    """Reads tasks for one kind of desktop and one kind of grader."""

    @property
    def grader_version(self) -> str:
        """The name of what scores are made by."""
        ...

    def plan(self, task_config: Mapping[str, Any]) -> Plan:
        """
        Raises:
            TaskError: the task is malformed, or needs what this server does not have.
        """
        ...

    async def close(self) -> None: ...
