"""What an env server is told, from its command line and from the environment; the one place that reads os.environ."""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from osworld_pipeline.errors import PipelineError

TOKEN_VARIABLE = "ENV_SERVER_TOKEN"  # noqa: S105 - the variable's name, not a token
DEFAULT_DOWNLOAD_HOSTS = (
    "drive.google.com",
    "drive.usercontent.google.com",
    "huggingface.co",
    "raw.githubusercontent.com",
    "codeload.github.com",
)
"""Where OSWorld's task files download from."""


class SettingsError(PipelineError):
    """What was asked for contradicts itself, or is not safe."""


class TaskLimits(BaseModel):
    """What a task may take of the server and of the network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setup_timeout_s: float = Field(default=180.0, gt=0)
    evaluate_timeout_s: float = Field(default=180.0, gt=0)
    sleep_s: float = Field(default=60.0, gt=0)
    """The longest `sleep` verb."""
    download_hosts: tuple[str, ...] = DEFAULT_DOWNLOAD_HOSTS
    download_max_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    download_timeout_s: float = Field(default=120.0, gt=0)
    upload_root: Path | None = None
    """Folder on this machine below which `upload_file` may read; None allows no file."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str = "local"
    num_replicas: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535)
    screen_width: int = Field(default=1920, ge=64)
    screen_height: int = Field(default=1080, ge=64)
    state_dir: Path = Path("var/desktops")
    ready_file: Path | None = None
    token: SecretStr | None = None
    """Bearer token; a SecretStr never shows in a log or a traceback."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """How long /reset waits for a free replica before 503."""
    idle_ttl_s: float = Field(default=900.0, gt=0)
    """An episode that nobody has used for so long is closed."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """For the first warm replica; the first start of all may build the image."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    limits: TaskLimits = TaskLimits()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **options: object) -> Self:
        """`options` come from the command line; the token comes from the environment alone, for an argument shows in
        every process list.

        Raises:
            SettingsError: it would serve a network without a token.
        """
        source = os.environ if environment is None else environment
        token = source.get(TOKEN_VARIABLE, "").strip()
        settings = cls.model_validate({**options, "token": SecretStr(token) if token else None})
        if settings.token is None and not is_loopback(settings.host):
            raise SettingsError(
                f"refusing to serve desktops on {settings.host} without a token: set {TOKEN_VARIABLE}, "
                "or bind to 127.0.0.1"
            )
        return settings


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
