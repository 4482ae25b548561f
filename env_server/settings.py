"""The settings of an env server, without those of its kinds of desktops."""

import argparse
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, SecretStr, field_validator

from env_server.table import Option, Table
from osworld_pipeline.errors import PipelineError

TOKEN_VARIABLE = "ENV_SERVER_TOKEN"  # noqa: S105 - the variable's name, not a token
OSGYM_VARIABLE = "OSGYM_ALLOWED_IPS"
DEFAULT_DOWNLOAD_HOSTS = (
    "drive.google.com",
    "drive.usercontent.google.com",
    "huggingface.co",
    "raw.githubusercontent.com",
    "codeload.github.com",
)
"""The hosts that OSWorld's task files download from."""


OwnTable = TypeVar("OwnTable", bound=Table)


class SettingsError(PipelineError):
    """The settings contradict each other, or are not safe."""


class TaskLimits(Table):
    """Limits of a task on the server and the network."""

    setup_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """Time limit of its whole set-up."""
    evaluate_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    """Time limit of its whole grading."""
    sleep_s: Annotated[float, Field(gt=0)] = 60.0
    """The longest `sleep` verb."""
    download_hosts: tuple[str, ...] = DEFAULT_DOWNLOAD_HOSTS
    """Hosts from which the verb `download` may fetch."""
    download_max_bytes: Annotated[int, Field(gt=0)] = 512 * 1024 * 1024
    """Largest file that it may fetch."""
    download_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit of one download."""
    upload_root: Annotated[Path | None, Option(), Field(examples=["/srv/tasks"])] = None
    """Folder on this machine below which the verb `upload_file` may read. Without it no file."""


def _ports(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"ports must be numbers, separated by commas, not {text!r}")
    return tuple(map(int, parts))


class OsgymSettings(Table):
    """OSGym's worker ports, in addition to the main port, which has the same API under /osgym. Its clients' addresses
    come from OSGYM_ALLOWED_IPS."""

    ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], Option("--osgym-ports", "PORTS", _ports)] = ()
    """Worker ports, for example 20000, 20001; on the command line separated by commas."""
    host: Annotated[str, Option("--osgym-host")] = "127.0.0.1"
    """The address of these ports."""
    replicas_per_port: Annotated[int, Option("--osgym-replicas-per-port"), Field(ge=1)] = 2
    """Most desktops of one port's clients at a time."""
    pause_s: Annotated[float, Option("--osgym-pause-s"), Field(ge=0, le=60)] = 2.0
    """How long the screen settles after a step."""


class Settings(Table):
    """What every server has; the settings of a server program are `ServerSettings`."""

    provider: str = "local"
    """Kind of desktop."""
    grader: Annotated[Literal["own", "osworld"], Option()] = "own"
    """The metrics that score an episode; `osworld` needs desktop-env in a separate environment, see [desktop_env]."""
    allow_unsandboxed_graders: Annotated[bool, Option()] = False
    """If namespaces are unavailable, run OSWorld's graders with the server's permissions and network."""
    num_replicas: Annotated[int, Option("--replicas"), Field(ge=1)] = 1
    """Desktops that are kept warm. Each uses its memory (see [local], [qemu]) all the time."""
    host: Annotated[str, Option()] = "127.0.0.1"
    """Any address but loopback requires a token."""
    port: Annotated[int, Option(), Field(ge=0, le=65535)] = 8100
    """0 selects a free port."""
    screen_width: Annotated[int, Field(ge=64)] = 1920
    """Width of every desktop's screen, in pixels. A client that asks for another size is refused."""
    screen_height: Annotated[int, Field(ge=64)] = 1080
    """Height of every desktop's screen, in pixels."""
    state_dir: Annotated[Path, Option()] = Path("var/desktops")
    """Images, downloads and running replicas; some GB."""
    ready_file: Annotated[Path | None, Option(), Field(examples=["ready.json"])] = None
    """{url, pid} is written to it when the server is ready."""
    token: SecretStr | None = None
    """Bearer token; a SecretStr never shows in a log or a traceback."""
    queue_timeout_s: Annotated[float, Option(), Field(gt=0)] = 60.0
    """How long a reset waits for a free replica; then 503 with Retry-After."""
    idle_ttl_s: Annotated[float, Option(), Field(gt=0)] = 900.0
    """An episode without calls for this time is closed; one with a call in progress never is."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Limit until the first replica is warm, and then again until the others are; then the server serves with those
    that are warm. The very first start may build the image."""
    drain_episodes_s: Annotated[float, Option(), Field(ge=0)] = 0.0
    """How long live episodes may continue after SIGTERM, while new ones are refused. A second SIGTERM ends at once."""
    drain_timeout_s: Annotated[float, Option(), Field(ge=0)] = 30.0
    """How long calls in progress may take after that, before every remaining episode is closed."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * 1024 * 1024
    """A larger request is answered 413."""
    max_connections: Annotated[int, Option(), Field(gt=0)] = 2048
    """Further connections are answered 503 at once."""
    slow_client_s: Annotated[float, Field(gt=0)] = 10.0
    """Time limit for a request's head, how long its body may stay below 64 KiB per second, and how long a client may
    take to read the next part of an answer."""
    keep_alive_s: Annotated[float, Field(gt=0)] = 75.0
    """How long a connection may stay open without a request; longer than clients keep theirs, so that they close."""
    access_log: Annotated[bool, Option()] = False
    """Log one line per request: method, path, status, bytes, milliseconds; never a token, a query or a body."""
    allow_takeover: Annotated[bool, Option()] = False
    """A person may send mouse and keyboard input to a live desktop, on /status or with the API. The episode is then
    marked as touched. Any client with the token may do so; without a token, any program on this machine."""
    viewer_url: Annotated[str, Option(), Field(examples=["http://127.0.0.1:8765"])] = ""
    """Address of the trajectory viewer, for links from /status to the stored episodes."""
    open_metrics: Annotated[bool, Option()] = False
    """/metrics answers without the token."""
    limits: TaskLimits = TaskLimits()
    osgym: OsgymSettings = OsgymSettings()
    osgym_allowed_ips: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    """The addresses whose requests OSGym's API answers; without it, the API on the main port answers every address.
    Required for its worker ports. Only from the environment."""

    @field_validator("viewer_url")
    @classmethod
    def _is_a_web_address(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is not the address of a viewer: an address starts with http:// or https://")
        return url.rstrip("/")

    def of(self, kind: type[OwnTable]) -> OwnTable:
        """The settings of a provider, by their class."""
        return next(value for _, value in self if isinstance(value, kind))

    @property
    def screen(self) -> tuple[int, int]:
        """(width, height)"""
        return self.screen_width, self.screen_height


def osgym_networks(environment: Mapping[str, str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """The networks whose requests OSGym's API answers. SettingsError names an entry that is no address or network."""
    text = environment.get(OSGYM_VARIABLE, "")
    try:
        return tuple(ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise SettingsError(f"{OSGYM_VARIABLE}: {error}; give addresses or networks, separated by commas") from error
