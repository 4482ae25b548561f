"""Where the viewer listens, what it shows, and what it must be told by whom."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.viewer import DAGSTER_URL, DEFAULT_HOST, DEFAULT_PORT, MLFLOW_URL
from osworld_pipeline.wire.cross_site import is_loopback

TOKEN_VARIABLE = "OSWORLD_VIEWER_TOKEN"  # noqa: S105 - the variable's name, not a token
QUESTION_LIMIT_S = 15.0


class ViewerError(PipelineError):
    """The viewer cannot start, or cannot show what it was asked for."""


class NotFoundError(ViewerError):
    """What was asked for is not in the store."""


class BadQuestionError(ViewerError):
    """A condition that cannot be asked, or takes too long or too much memory."""


class TooBusyError(ViewerError):
    """As many conditions are asked already as may be at a time."""


@dataclass(frozen=True, kw_only=True)
class ViewerSettings:
    state: StateDir
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0: any that is free."""
    token: SecretStr | None = field(default=None)
    """A browser shows it once; a SecretStr never shows in a log or a traceback."""
    mlflow_url: str = MLFLOW_URL
    """Where people see MLflow."""
    dagster_url: str = DAGSTER_URL
    """Where people see Dagster."""
    max_connections: int = 512
    """One more is answered 503 at once."""
    slow_client_s: float = 10.0
    """How long a request may take to arrive; a connection without one is closed then."""
    question_s: float = QUESTION_LIMIT_S
    """How long a search of what models said, or a condition in SQL, may take."""

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a token: only programs on this machine can ask anything."""
        return self.token is None


def token_from(environment: Mapping[str, str] | None = None) -> SecretStr | None:
    """From the environment alone, for an argument shows in every process list."""
    token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE, "").strip()
    return SecretStr(token) if token else None


def need_token(settings: ViewerSettings) -> None:
    """
    Raises:
        ViewerError: it would serve a network without a token.
    """
    if settings.token is None and not is_loopback(settings.host):
        raise ViewerError(
            f"refusing to show trajectories on {settings.host} without a token: set {TOKEN_VARIABLE}, "
            "or bind to 127.0.0.1"
        )
