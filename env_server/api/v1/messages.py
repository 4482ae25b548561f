"""The messages of our own API, /v1. Failures are `wire.ErrorMessage`, as in the other APIs."""

import time
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from env_server.episodes.episode import Episode
from osworld_pipeline.domain.observation import Settle
from osworld_pipeline.wire import MAX_NOTE, MAX_RECORD_ID, EnvConfig, ImageFormat, Message

MAX_DEADLINE_S = 7 * 24 * 3600
TASK_EXAMPLE = {
    "id": "make-file",
    "instruction": "Make the file a.txt on the desktop.",
    "config": [{"type": "launch", "parameters": {"command": ["xterm"]}}],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": "ls ~/Desktop", "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "a.txt\n"}},
    },
}


class OpenRequest(Message):
    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: str = Field(min_length=1, max_length=128, examples=["run-7/task-3/attempt-0"])
    """The client's name for this request. Sent again after a lost answer, it returns the same episode."""
    task_config: dict[str, Any] = Field(examples=[TASK_EXAMPLE])
    """A task in OSWorld's format."""
    env_config: EnvConfig = Field(default_factory=EnvConfig)
    client_id: str = Field(default="", max_length=128)
    """The queue counts requests with the same id as one client; empty means the peer address."""
    queue_s: float | None = Field(default=None, gt=0, le=3600, allow_inf_nan=False)
    """Longest wait for a free desktop in seconds, if it is shorter than the server's own limit; after it, 503."""
    record_id: str = Field(default="", max_length=MAX_RECORD_ID)
    """The id under which the client will store the episode, for people who watch the desktop on /status."""


class StepMessage(Message):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = Field(ge=1, examples=[1])
    """The number of this step, counted from 1. Sent again after a lost answer, the step is executed once and gets the
    same answer."""
    action: str = Field(examples=["pyautogui.click(200, 120)", "WAIT", "DONE"])
    """`pyautogui.f(...)` calls with literal arguments, or WAIT, DONE, FAIL."""
    pause: float = Field(default=2.0, ge=0.0, le=60.0, allow_inf_nan=False)
    """Seconds to let the screen settle before the observation."""
    settle: Settle = "fixed"
    """`adaptive` observes as soon as the screen has settled, at the latest after `pause`."""
    image_format: ImageFormat | None = None
    """Format of this step's observation; None means the episode's setting."""
    image_quality: int | None = Field(default=None, ge=1, le=100)
    note: str = Field(default="", max_length=MAX_NOTE)
    """What the policy said, for people who watch the desktop on /status."""


class ObservationBody(Message):
    accessibility_tree: str | None = None
    terminal: str | None = None
    instruction: str = ""
    screenshot_format: ImageFormat
    screen_size: tuple[int, int] | None = None
    """(width, height) of the screen if the screenshot has another size."""
    screenshot_base64: str | None = None
    """Absent in a multipart answer, whose second part is the image."""


class OpenAnswer(Message):
    episode_id: str
    replica_id: str
    provider: str
    image_digest: str
    grader_version: str
    reset_s: float
    """Time from the request to the first observation, including the wait for a desktop."""
    observation: ObservationBody


class StepReply(Message):
    step: int
    action: str
    is_done: bool
    """The action was DONE or FAIL. The episode stays open for its evaluation."""
    is_repeated: bool
    """The step had been executed before; this is the same answer again."""
    num_person_inputs: int
    """Inputs that a person has sent to the desktop; above 0 the episode is touched."""
    observation: ObservationBody


class ObservationReply(Message):
    observation: ObservationBody


class EvaluationReply(Message):
    reward: float = Field(ge=0.0, le=1.0)
    evaluate_s: float
    grader_version: str
    num_person_inputs: int
    """Inputs that a person has sent to the desktop; above 0 the reward is not the policy's own."""


class EpisodeInfo(Message):
    episode_id: str
    task_id: str
    client_id: str
    replica_id: str
    num_steps: int
    last_action: str | None
    reward: float | None
    """The reward of the last evaluation; null before one, and after a further step."""
    num_person_inputs: int
    is_demonstration: bool
    """Its client executes a person's inputs."""
    is_busy: bool
    age_s: float
    idle_s: float

    @classmethod
    def of(cls, episode: Episode) -> Self:
        now = time.monotonic()
        return cls(
            episode_id=episode.episode_id,
            task_id=episode.plan.task.task_id,
            client_id=episode.client_id,
            replica_id=episode.replica_id,
            num_steps=episode.num_steps,
            last_action=episode.last_action,
            reward=episode.reward,
            num_person_inputs=episode.num_person_inputs,
            is_demonstration=episode.demonstration is not None,
            is_busy=episode.is_busy,
            age_s=now - episode.opened_at,
            idle_s=now - episode.last_used_at,
        )


class EpisodeList(Message):
    episodes: tuple[EpisodeInfo, ...]


class ReplicaInfo(Message):
    replica_id: str
    state: Literal["starting", "warm", "leased", "resetting", "failed"]
    state_s: float
    """Seconds in this state."""
    num_served: int
    num_starts: int
    num_failures: int
    last_error: str | None
    episode: EpisodeInfo | None


class ReplicaList(Message):
    replicas: tuple[ReplicaInfo, ...]
    waiting: int


class CordonRequest(Message):
    model_config = ConfigDict(extra="forbid", frozen=True)

    is_cordoned: bool
    """Whether new episodes are refused."""


class DrainRequest(Message):
    model_config = ConfigDict(extra="forbid", frozen=True)

    deadline_s: float = Field(ge=0, le=MAX_DEADLINE_S, allow_inf_nan=False)
    """Seconds from now that live episodes may go on. Calls in progress then get `drain_timeout_s` in addition."""


class DrainAnswer(Message):
    num_episodes: int
    """Live episodes; the server exits once none is left."""
    left_s: float
    """Seconds until those that are left are closed: less than `deadline_s` after an earlier request or signal."""


class ServerInfo(Message):
    version: str
    protocol: int
    """Version of this API; a client with another one refuses the server. A server that reports none has version 1."""
    provider: str
    image_digest: str
    grader_version: str
    details: str
    """Free text: the accelerator and the limits of the provider's desktops."""
    screen_size: tuple[int, int]
    num_replicas: int
    is_draining: bool
    uptime_s: float
    surfaces: tuple[str, ...]
    limits: dict[str, float]
