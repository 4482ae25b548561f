"""OSGym's environment on our env server: `reset()` and `step(text)` for one desktop, with OSGym's dialect, prompt and
configuration names.

A response without a valid call changes nothing, and the model receives the reason. A fault is raised and is never a
reward of zero. The step that reaches `max_step` is executed and graded. A policy that disables its desktop or
interferes with grading has failed: its episode ends with a reward of zero.
"""

import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.dialects import ParsedTurn, load_dialect
from osworld_pipeline.dialects.actions import ends_episode
from osworld_pipeline.dialects.commands import split_command
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, RecipeError, ReplicaError, TamperingError, TaskError
from osworld_pipeline.integrations.osgym.desktops import WaitingDesktop
from osworld_pipeline.integrations.osgym.prompts import Markup, Part, Prompt
from osworld_pipeline.integrations.osgym.step_record import StepRecord
from osworld_pipeline.rollout.env_client import EnvTimeouts
from osworld_pipeline.rollout.signals import step_signals
from osworld_pipeline.wire import EnvConfig, ImageFormat

DIFF_THRESHOLD = 0.01
"""Threshold of a changed screen, as in recipes."""


class OsgymEnvConfig(BaseModel):
    """`env_config` with OSGym's names (the first seven) and ours; others are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    server_url: str | tuple[str, ...]
    """URL of one env server, or of several; an episode goes to the one with the most free desktops."""
    json_dir: Path
    """Folder of tasks: every .json file below it."""
    img_h: int = Field(default=1080, ge=32)
    img_w: int = Field(default=1920, ge=32)
    """The screen's size."""
    max_step: int = Field(default=100, ge=1)
    max_hist: int = Field(default=10, ge=1)
    """Maximum number of screenshots in the prompt."""
    timeout: float = Field(default=120.0, gt=0)
    """Timeout of one request in seconds."""
    vlm_img_w: int = Field(default=1260, ge=32)
    vlm_img_h: int = Field(default=700, ge=32)
    """Size of the screenshots in the model's input; they are resized on the desktop's machine."""
    image_format: ImageFormat = "jpeg"
    image_quality: int | None = Field(default=80, ge=1, le=100)
    prompt_format: Literal["osgym", "chatml"] = "osgym"
    """`osgym`: the task, then screenshots and actions in turn. `chatml`: the same as a conversation in Qwen's chat
    template."""
    dialect: str = "osgym"
    coordinate_space: str = "dialect"
    pause_s: float = Field(default=2.0, ge=0.0, le=60.0)
    capacity_s: float = Field(default=300.0, gt=0)
    """How long a reset waits for a free replica."""
    seed: int | None = None
    """Seed of the task selection, which differs by worker."""
    token: SecretStr | None = None


class OsgymEnv:
    """One environment; `MultiTurnDataloader`'s `env_class`."""

    def __init__(
        self,
        env_config: OsgymEnvConfig | Mapping[str, Any],
        worker_id: int = 0,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Raises:
            RecipeError: a key of the configuration is unknown or invalid; names it.
            TaskError: there are no tasks, or one is malformed.
        """
        self.config = config = _checked(env_config)
        self.tasks = read_tasks(config.json_dir)
        self._random = random.Random(None if config.seed is None else f"{config.seed}:{worker_id}")
        try:
            self._dialect = load_dialect(config.dialect, config.coordinate_space)
        except ValueError as error:
            raise RecipeError(f"env_config: {error}") from error
        self._desktop = WaitingDesktop(
            config.server_url,
            token=config.token.get_secret_value() if config.token else None,
            env_config=EnvConfig(
                screen_size=(config.img_w, config.img_h),
                require_a11y_tree=False,
                image_format=config.image_format,
                image_quality=config.image_quality,
                image_size=(config.vlm_img_w, config.vlm_img_h),
            ),
            timeouts=EnvTimeouts(request_s=config.timeout, capacity_s=config.capacity_s),
            client_id=f"osgym-{worker_id}",
            transport=transport,
        )
        self._meta_info: dict[str, Any] = {}
        self._turns: list[tuple[bytes, str]] = []
        """Screenshot and response."""
        self._before: Observation | None = None
        self._task = self.tasks[0]
        self._num_steps = 0
        self._is_over = True

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A random task on a fresh desktop. Raises as `protocols.Desktop.reset`."""
        self._is_over = True
        self._task = self._random.choice(self.tasks)
        self._before, info = self._desktop.reset(self._task)
        self._turns, self._num_steps, self._is_over = [], 0, False
        self._meta_info = {
            "uid": uuid.uuid4().hex,
            "task_id": self._task.task_id,
            "task_digest": self._task.config_digest,
            "replica_id": info.replica_id,
            "provider": info.provider,
            "image_digest": info.image_digest,
            "grader_version": info.grader_version,
        }
        return {"obs": self._prompt(self._before.screenshot), "done": False, "is_init": True}, self._meta_info

    def step(self, action: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        Raises:
            ValueError: the episode is over.
            EnvServerError, ReplicaError, EvaluatorError: the episode is lost; its desktop has been released.
        """
        if self._is_over or self._before is None:
            raise ValueError("the episode is over: call reset first")
        self._is_over = True  # until the step has succeeded
        try:
            return self._step(action, self._before), self._meta_info
        finally:
            if self._is_over:
                self._desktop.give_back()

    def close(self) -> None:
        """Releases the desktop; idempotent."""
        self._is_over = True
        self._desktop.close()

    def _step(self, text: str, before: Observation) -> dict[str, Any]:
        started = time.monotonic()
        image = _model_image(before)
        shown = self._prompt(before.screenshot)
        turn = self._dialect.parse(text)
        after, error, tampering, reward = before, None, None, 0.0
        done = has_ended = False
        self._num_steps += 1
        try:
            after, error = self._act(turn, image, before)
            has_ended = error is None and turn.arguments is not None and ends_episode(turn.arguments)
            done = has_ended or self._num_steps >= self.config.max_step
            reward = self._desktop.score() if done else 0.0
        except TamperingError as found:
            tampering, done = str(found), True
        said = text if error is None else f"{text}\n[not carried out: {error}]\n"
        self._turns.append((before.screenshot, said))
        fields: dict[str, Any] = {
            "screenshot_width": image.width,
            "screenshot_height": image.height,
            "screenshot_format": image.format,
            "screenshot_num_bytes": len(image.data),
            "observation_text": self._task.instruction if self._num_steps == 1 else "",
            "response_text": text,
            "action": turn.arguments,
            "command": self._command(turn, image),
            "signals": step_signals(
                turn, before, after, executed=error is None, error=error, diff_threshold=DIFF_THRESHOLD
            ),
            "model_s": 0.0,
            "step_s": time.monotonic() - started,
        }
        self._before, self._is_over = after, done
        return {
            "prev_obs": shown,
            "action": text,
            "obs": self._prompt(after.screenshot),
            "reward": reward,
            "done": done,
            "is_init": False,
            "is_truncated": done and not has_ended and tampering is None,
            "action_error": error,
            "tampering": tampering,
            "record": StepRecord(fields=fields, screenshot=before.screenshot, suffix=f".{image.format}"),
        }

    def _act(self, turn: ParsedTurn, image: ModelImage, before: Observation) -> tuple[Observation, str | None]:
        """The next observation, and the reason if no action ran."""
        command = self._command(turn, image)
        if command is None:
            return before, turn.error or "no action found in the response"
        try:
            after = before
            for part in split_command(command):
                after = self._desktop.act(part, pause_s=self.config.pause_s)
            return after, None
        except ActionParseError as error:
            return before, str(error)

    def _command(self, turn: ParsedTurn, image: ModelImage) -> str | None:
        if turn.arguments is None:
            return None
        scale = partial(image.to_screen, space=self._dialect.coordinate_space)
        return self._dialect.to_command(turn.arguments, scale)

    def _prompt(self, screenshot: bytes) -> Prompt:
        """The task, the newest `max_hist` screenshots, and the responses to all but the last of them."""
        is_chat = self.config.prompt_format == "chatml"
        begin, to_policy, to_user = _CHAT if is_chat else ("", "", "")
        parts: list[Part] = [Markup(begin)]
        if is_chat:
            parts += [self._dialect.system_prompt("short"), Markup(to_user)]
        parts.append(self._task.instruction)
        for shown, said in self._turns[max(0, len(self._turns) + 1 - self.config.max_hist) :]:
            parts += [shown, Markup(to_policy), said, Markup(to_user)]
        parts += [screenshot, Markup(to_policy)]
        return tuple(part for part in parts if part)


_CHAT = (
    "<|im_start|>system\n",
    "<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>user\n",
)


def read_tasks(folder: Path) -> tuple[Task, ...]:
    """Every task below a folder, sorted by path.

    Raises:
        TaskError: there are no tasks, or a file contains none.
    """
    tasks = []
    for path in sorted(folder.rglob("*.json")):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            tasks.append(Task.from_config(config, domain=path.parent.name))
        except (OSError, ValueError, AttributeError) as error:
            raise TaskError(f"{path} does not contain a task: {error}") from error
    if not tasks:
        raise TaskError(f"there are no tasks below {folder}: put OSWorld's JSON files there")
    return tuple(tasks)


def _model_image(observation: Observation) -> ModelImage:
    """The screenshot as a model image, with unchanged bytes: the desktop has resized it."""
    data = observation.screenshot
    try:
        with open_picture(data) as image:
            width, height = image.size
            image_format = (image.format or observation.image_format).lower()
            image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        message = f"the desktop sent a screenshot of {len(data)} bytes that is not an image: {error}"
        raise ReplicaError(message) from error
    screen_width, screen_height = observation.screen_size or (width, height)
    return ModelImage(
        data=data,
        format=image_format,
        width=width,
        height=height,
        screen_width=screen_width,
        screen_height=screen_height,
        sha256=digest_bytes(data),
    )


def _checked(env_config: OsgymEnvConfig | Mapping[str, Any]) -> OsgymEnvConfig:
    if isinstance(env_config, OsgymEnvConfig):
        return env_config
    try:
        return OsgymEnvConfig.model_validate(dict(env_config))
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors()[0]
        where: Sequence[Any] = first["loc"]
        raise RecipeError(f"env_config.{'.'.join(map(str, where))}: {first['msg']}") from error
