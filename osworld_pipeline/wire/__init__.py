"""The messages between env server and client: Slime-OSWorld's endpoints, with additional fields of ours.

Every added field is optional on the way in and ignored by a client that does not know it. A failure is a 4xx or 5xx
with an `ErrorMessage`; `fault` tells which outcome the episode must end in.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from osworld_pipeline.domain.observation import Settle

ImageFormat = Literal["png", "jpeg", "webp"]
ImageSide = Annotated[int, Field(ge=1, le=16_384)]
Fault = Literal["env_fault", "grader_fault", "policy_fault", "tampering", "client_error", "no_capacity"]


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


class EnvConfig(Message):
    """Slime's env_config. `provider_name`, `os_type` and `headless` are accepted and checked, not obeyed blindly."""

    provider_name: str | None = None
    os_type: str = "Ubuntu"
    action_space: str = "pyautogui"
    screen_size: tuple[int, int] | None = None
    """(width, height); None takes the server's. A server with other replicas refuses with 409."""
    headless: bool = True
    require_a11y_tree: bool = True
    require_terminal: bool = False
    image_format: ImageFormat = "png"
    image_quality: int | None = Field(default=None, ge=1, le=100)
    """For the lossy formats; None is the desktop's own choice."""
    image_size: tuple[ImageSide, ImageSide] | None = None
    """(width, height) of the screenshots in answers; None is the screen's own. Actions count the screen's pixels."""


class ResetRequest(Message):
    task_config: dict[str, Any]
    env_config: EnvConfig = Field(default_factory=EnvConfig)
    client_id: str = ""
    """Whose fair share of the queue this is; empty takes the peer address."""
    request_id: str = Field(default="", max_length=128)
    """A name of the client's own for this reset: sent again after a lost answer, it gets the same episode."""


class StepRequest(Message):
    episode_id: str
    action: str
    """`pyautogui.f(...)` calls with literal arguments, or WAIT, DONE, FAIL."""
    pause: float = Field(default=2.0, ge=0.0, le=60.0, allow_inf_nan=False)
    """Seconds to let the screen settle before the next observation."""
    settle: Settle = "fixed"
    """`adaptive` observes as soon as the screen has settled, at the latest after `pause`."""
    step: int | None = Field(default=None, ge=1)
    """The number this step is to have, counted from 1. With it a step may be sent again after a lost answer: it is
    done once, and answered the same."""


class EpisodeRequest(Message):
    episode_id: str


class ObservationMessage(Message):
    accessibility_tree: str | None = None
    terminal: str | None = None
    instruction: str = ""
    screenshot_base64: str
    screenshot_format: ImageFormat = "png"
    screen_size: tuple[int, int] | None = None
    """(width, height) of the screen where the screenshot has another size."""


class ResetAnswer(ObservationMessage):
    episode_id: str
    replica_id: str = ""
    provider: str = ""
    image_digest: str = ""
    """Digest of the desktop image the replica was made from."""
    grader_version: str = ""
    reset_s: float = 0.0
    can_resend: bool = False
    """This episode's numbered steps and its evaluation may be sent again after a lost answer. Ours says true."""


class StepAnswer(ObservationMessage):
    reward: float = 0.0
    """Always 0 before /evaluate, as OSWorld's env.step answers."""
    done: bool = False
    step: int = 0
    info: dict[str, Any] = Field(default_factory=dict)


class EvaluateAnswer(Message):
    reward: float
    evaluate_s: float = 0.0


class CloseAnswer(Message):
    status: Literal["closed"] = "closed"
    episode_id: str


class HealthAnswer(Message):
    status: Literal["ok", "draining"] = "ok"
    episodes: int
    replicas: int = 0
    free: int = 0
    active_sessions: int = 0
    """`episodes` and `replicas` once more, by the names that AReaL's bridge has for them."""
    max_envs: int = 0
    can_resend: bool = False
    """A named reset may be sent again after a lost answer. Ours says true."""


class ErrorMessage(Message):
    error: str
    """One sentence: what, where, what to do."""
    fault: Fault = "env_fault"
