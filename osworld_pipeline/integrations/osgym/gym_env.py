"""The desktop as a Gymnasium environment: `gymnasium.make("osworld_pipeline/Desktop-v0", server_url=..., tasks=...)`.

Importing this module registers it. An observation is the screenshot and the task's instruction, an action is a turn of
text in the environment's dialect (OSGym's calls by default), and the grader's score is the reward of the last step.
"""

import string
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import httpx
import numpy as np
from gymnasium import spaces
from PIL import Image

from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.dialects.actions import ends_episode
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.dialects.coordinates import to_screen
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EnvServerError,
    EvaluatorError,
    ReplicaError,
    SetupError,
    TamperingError,
    TaskError,
)
from osworld_pipeline.integrations.osgym.desktops import WaitingDesktop
from osworld_pipeline.integrations.osgym.environment import read_tasks
from osworld_pipeline.rollout.env_client import EnvTimeouts
from osworld_pipeline.wire import EnvConfig, ImageFormat

ENV_ID = "osworld_pipeline/Desktop-v0"
MAX_ACTION_CHARS = 10_000
FAULTS = (EnvServerError, EvaluatorError, ReplicaError, SetupError)

DesktopObservation = dict[str, Any]
"""`screenshot`: uint8 (height, width, 3); `instruction`: the task's instruction."""


class DesktopEnv(gymnasium.Env[DesktopObservation, str]):
    """One desktop. `terminated`: the policy has declared the task done or infeasible; `truncated`: the step limit is
    reached. Both are graded. If the policy disables its desktop or interferes with grading, the episode is terminated
    with a reward of zero, and `info["tampering"]` has the reason. An invalid action changes nothing, and
    `info["action_error"]` has the reason."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own name and kind

    def __init__(
        self,
        server_url: str | Sequence[str],
        tasks: str | Path | Sequence[Mapping[str, Any]],
        *,
        screen_size: tuple[int, int] = (1920, 1080),
        image_size: tuple[int, int] | None = None,
        image_format: ImageFormat = "png",
        max_steps: int = 50,
        pause_s: float = 1.0,
        dialect: str = "osgym",
        coordinate_space: str = "dialect",
        fault_mode: Literal["raise", "truncate"] = "raise",
        token: str | None = None,
        request_s: float = 120.0,
        capacity_s: float = 300.0,
        render_mode: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tasks`: a folder of OSWorld's JSON files, or their contents. `screen_size`: (width, height) of the desktop.
        `image_size`: (width, height) of the screenshots; None for that of the screen. `fault_mode` selects how a lost
        desktop or a crashed grader is reported: as an exception, or as a truncated episode with a reward of NaN and the
        message in `info["fault"]`, so that a vector of environments continues. A fault is never a reward of zero.

        Raises:
            TaskError: there are no tasks, or one is malformed.
            ValueError: there is no such dialect or render mode.
        """
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is 'rgb_array' or None, not {render_mode!r}")
        self.render_mode = render_mode
        self.tasks = read_tasks(Path(tasks)) if isinstance(tasks, str | Path) else _tasks_of(tasks)
        self._dialect = load_dialect(dialect, coordinate_space)
        self._image_size = image_size or screen_size
        self._max_steps, self._pause_s, self._fault_mode = max_steps, pause_s, fault_mode
        self._desktop = WaitingDesktop(
            server_url,
            token=token,
            env_config=EnvConfig(
                screen_size=screen_size, require_a11y_tree=False, image_format=image_format, image_size=image_size
            ),
            timeouts=EnvTimeouts(request_s=request_s, capacity_s=capacity_s),
            client_id="gymnasium",
            transport=transport,
        )
        width, height = self._image_size
        words = [task.instruction for task in self.tasks]
        self.observation_space = spaces.Dict(
            {
                "screenshot": spaces.Box(0, 255, (height, width, 3), np.uint8),
                "instruction": spaces.Text(max(map(len, words)), charset=frozenset("".join(words))),
            }
        )
        self.action_space = spaces.Text(MAX_ACTION_CHARS, min_length=0, charset=string.printable)
        self._task = self.tasks[0]
        self._seen: Observation | None = None
        """None if there is no running episode."""
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[DesktopObservation, dict[str, Any]]:
        """A fresh desktop for a task selected by the seed, or for `options["task_id"]`.

        Raises:
            TaskError: there is no such task.
            EnvServerError, ReplicaError, SetupError: no desktop could be prepared; raised in both fault modes.
        """
        super().reset(seed=seed)
        self._task = self._choose((options or {}).get("task_id"))
        self._seen = None
        self._seen, info = self._desktop.reset(self._task)
        self._num_steps = 0
        desktop = {"replica_id": info.replica_id, "provider": info.provider, "image_digest": info.image_digest}
        return self._observation(self._seen), {"task_id": self._task.task_id, **desktop}

    def step(self, action: str) -> tuple[DesktopObservation, float, bool, bool, dict[str, Any]]:
        """
        Raises:
            ValueError: there is no running episode.
            EnvServerError, ReplicaError, EvaluatorError: the episode is lost (`fault_mode="raise"`).
        """
        before, self._seen = self._seen, None
        if before is None:
            raise ValueError("there is no running episode: call reset first")
        info: dict[str, Any] = {"task_id": self._task.task_id}
        try:
            return self._step(action, before, info)
        except TamperingError as error:
            info["tampering"] = str(error)
            return self._observation(before), 0.0, True, False, info
        except FAULTS as error:
            if self._fault_mode == "raise":
                raise
            info |= {"fault": str(error) or type(error).__name__, "fault_kind": type(error).__name__}
            return self._observation(before), float("nan"), False, True, info
        finally:
            if self._seen is None:
                self._desktop.give_back()

    def render(self) -> np.ndarray | None:  # pyright: ignore[reportIncompatibleMethodOverride] - narrower than Gymnasium's
        """The last screenshot; None without a render mode or a running episode."""
        if self.render_mode is None or self._seen is None:
            return None
        return self._observation(self._seen)["screenshot"]

    def close(self) -> None:
        """Releases the desktop; idempotent."""
        self._seen = None
        self._desktop.close()

    def _step(
        self, action: str, before: Observation, info: dict[str, Any]
    ) -> tuple[DesktopObservation, float, bool, bool, dict[str, Any]]:
        turn = self._dialect.parse(action)
        after, error = before, turn.error
        if turn.arguments is not None:
            scale = partial(
                to_screen,
                space=self._dialect.coordinate_space,
                image=self._image_size,
                screen=before.screen_size or self._image_size,
            )
            try:
                for part in split_command(self._dialect.to_command(turn.arguments, scale)):
                    after = self._desktop.act(part, pause_s=self._pause_s)
            except ActionParseError as refused:
                after, error = before, str(refused)
        if error is not None:
            info["action_error"] = error
        self._num_steps += 1
        terminated = error is None and turn.arguments is not None and ends_episode(turn.arguments)
        truncated = not terminated and self._num_steps >= self._max_steps
        observation = self._observation(after)
        reward = self._desktop.score() if terminated or truncated else 0.0
        if not (terminated or truncated):
            self._seen = after
        return observation, reward, terminated, truncated, info

    def _choose(self, task_id: str | None) -> Task:
        if task_id is None:
            return self.tasks[int(self.np_random.integers(len(self.tasks)))]
        for task in self.tasks:
            if task.task_id == task_id:
                return task
        raise TaskError(f"there is no task {task_id!r} among the {len(self.tasks)} of this environment")

    def _observation(self, seen: Observation) -> DesktopObservation:
        try:
            with open_picture(seen.screenshot) as image:
                pixels = np.array(image.convert("RGB"))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ReplicaError(f"the desktop sent invalid image data: {error}") from error
        width, height = self._image_size
        if pixels.shape != (height, width, 3):
            raise EnvServerError(
                f"the server sends screenshots of {pixels.shape[1]}x{pixels.shape[0]}, not {width}x{height}: set "
                "screen_size to that of its desktops"
            )
        return {"screenshot": pixels, "instruction": self._task.instruction}


def _tasks_of(configs: Sequence[Mapping[str, Any]]) -> tuple[Task, ...]:
    if not configs:
        raise TaskError("an environment needs at least one task")
    return tuple(Task.from_config(config) for config in configs)


if ENV_ID not in gymnasium.registry:
    # A real desktop has a clock, and programs that start at any time.
    gymnasium.register(id=ENV_ID, entry_point=f"{__name__}:DesktopEnv", nondeterministic=True)
