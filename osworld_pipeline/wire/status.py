"""What an env server reports to pages that show its desktops: /status.json."""

from typing import Annotated

from pydantic import Field

from osworld_pipeline.wire import Message

Point = tuple[float, float]


class AboutServer(Message):
    version: str = ""
    provider: str = ""
    details: str = ""
    image_digest: str = ""
    grader_version: str = ""
    screen: Annotated[str, Field(pattern=r"^[0-9]{1,5}x[0-9]{1,5}$")]
    is_draining: bool = False
    allows_takeover: bool = False
    viewer_url: str = ""
    uptime_s: int = 0


class WatchedEpisode(Message):
    id: str
    record_id: str = ""
    task_id: str
    instruction: str = ""
    num_steps: int
    action: str = ""
    """The last action, or the last input of a person."""
    points: tuple[Point, ...] = ()
    """Where the action clicked, in pixels of the screen."""
    note: str = ""
    reward: float | None = None
    num_person_inputs: int = 0
    is_demonstration: bool = False
    client_id: str = ""
    is_busy: bool = False
    age_s: int = 0


class EndedEpisode(Message):
    """The last one of a replica."""

    task_id: str
    record_id: str = ""
    outcome: str
    num_steps: int
    reward: float | None = None


class WatchedReplica(Message):
    id: str
    state: str
    since_s: int = 0
    num_served: int = 0
    num_failures: int = 0
    last_error: str | None = None
    picture: str | None
    """Changes when the picture changes; None while there is none."""
    episode: WatchedEpisode | None
    last: EndedEpisode | None = None


class ServerStatus(Message):
    server: AboutServer
    num_free: int = 0
    num_waiting: int = 0
    num_opened: int = 0
    num_live: int = 0
    outcomes: dict[str, int] = Field(default_factory=dict)
    replicas: tuple[WatchedReplica, ...]
