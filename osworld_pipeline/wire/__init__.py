"""The messages between env server and client: Slime-OSWorld's endpoints, with additional fields.

Every added field is optional in requests and ignored by a client that does not know it. A failure is a 4xx or 5xx with
an `ErrorMessage`; its `fault` determines the outcome of the episode, if the failure ends it (wire/faults.py).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from osworld_pipeline.domain.observation import Settle

ImageFormat = Literal["png", "jpeg", "webp"]
ImageSide = Annotated[int, Field(ge=1, le=16_384)]
MAX_NOTE = 4_000
"""Characters of the note of a step."""
MAX_RECORD_ID = 256
Fault = Literal["env_fault", "grader_fault", "policy_fault", "tampering", "touched", "client_error", "no_capacity"]


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class EnvConfig(Message):
    """Slime's env_config. `os_type` and `action_space` must match the server; `provider_name` and `headless` are
    ignored."""

    provider_name: str | None = None
    os_type: str = "Ubuntu"
    action_space: str = "pyautogui"
    screen_size: tuple[int, int] | None = None
    """(width, height); None for the server's size. A server with another size refuses with 409."""
    headless: bool = True
    require_a11y_tree: bool = True
    require_terminal: bool = False
    image_format: ImageFormat = "png"
    image_quality: int | None = Field(default=None, ge=1, le=100)
    """Quality of the lossy formats; None for the desktop's default."""
    image_size: tuple[ImageSide, ImageSide] | None = None
    """(width, height) of the screenshots in answers; None for the screen's own. Actions use the screen's pixels."""


class ResetRequest(Message):
    task_config: dict[str, Any]
    env_config: EnvConfig = Field(default_factory=EnvConfig)
    client_id: str = ""
    """The client, for a fair share of the queue; empty uses the peer address."""
    request_id: str = Field(default="", max_length=128)
    """The client's own name for this reset: a reset that is sent again after a lost answer returns the same episode."""
    queue_s: float | None = Field(default=None, gt=0, le=3600, allow_inf_nan=False)
    """Longest wait for a free desktop in seconds, if it is shorter than the server's own limit; after it, 503."""
    record_id: str = Field(default="", max_length=MAX_RECORD_ID)
    """The id under which the client will store the episode, for people who watch the desktop on /status."""


class StepRequest(Message):
    episode_id: str
    action: str
    """`pyautogui.f(...)` calls with literal arguments, or WAIT, DONE, FAIL."""
    pause: float = Field(default=2.0, ge=0.0, le=60.0, allow_inf_nan=False)
    """Seconds to let the screen settle before the next observation."""
    settle: Settle = "fixed"
    """`adaptive` observes as soon as the screen has settled, after `pause` at the latest."""
    step: int | None = Field(default=None, ge=1)
    """The number of this step, counted from 1. With it a step may be sent again after a lost answer: it is executed
    once, and the same answer is returned."""
    note: str = Field(default="", max_length=MAX_NOTE)
    """What the policy said, for people who watch the desktop on /status."""


class EpisodeRequest(Message):
    episode_id: str


class ObservationMessage(Message):
    accessibility_tree: str | None = None
    terminal: str | None = None
    instruction: str = ""
    screenshot_base64: str
    screenshot_format: ImageFormat = "png"
    screen_size: tuple[int, int] | None = None
    """(width, height) of the screen if the screenshot has another size."""


class ResetAnswer(ObservationMessage):
    episode_id: str
    replica_id: str = ""
    provider: str = ""
    image_digest: str = ""
    """Digest of the desktop image that the replica was made from."""
    grader_version: str = ""
    reset_s: float = 0.0
    can_resend: bool = False
    """This episode's numbered steps and its evaluation may be sent again after a lost answer. Our server sends true."""


class StepAnswer(ObservationMessage):
    reward: float = 0.0
    """Always 0, as in OSWorld's env.step; /evaluate returns the reward."""
    done: bool = False
    step: int = 0
    num_person_inputs: int = Field(default=0, ge=0)
    """Inputs that a person has sent to the desktop so far; above 0 the episode is not the policy's own work."""
    info: dict[str, Any] = Field(default_factory=dict)


class EvaluateAnswer(Message):
    reward: float
    evaluate_s: float = 0.0


class NextInputRequest(Message):
    after: int = Field(default=0, ge=0)
    """The number of the last input that the client has executed; 0 before the first."""
    wait: float = Field(default=20.0, ge=0.0, le=30.0, allow_inf_nan=False)
    """Seconds to wait for an input."""


class NextInputAnswer(Message):
    number: int = 0
    """Number of the input, from 1; 0 if no input came in time."""
    action: str = ""
    """`pyautogui.f(...)` calls; DONE or FAIL if the person ended the demonstration."""


class CloseAnswer(Message):
    status: Literal["closed"] = "closed"
    episode_id: str


class HealthAnswer(Message):
    status: Literal["ok", "draining"] = "ok"
    episodes: int
    replicas: int = 0
    free: int = 0
    active_sessions: int = 0
    """`episodes` under the name that AReaL's bridge uses."""
    max_envs: int = 0
    """`replicas` under the name that AReaL's bridge uses."""
    can_resend: bool = False
    """A named reset may be sent again after a lost answer. Our server sends true."""


class ErrorMessage(Message):
    error: str
    """One sentence: what, where, what to do."""
    fault: Fault = "env_fault"
    num_person_inputs: int = 0
    """The inputs that a person sent in a touched episode; absent otherwise."""
