"""Settings of the viewer: its address, its state folder, its token and its limits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import SecretStr

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.web.viewer import DAGSTER_URL, DEFAULT_HOST, DEFAULT_PORT, MLFLOW_URL
from osworld_pipeline.wire.cross_site import is_loopback

TOKEN_VARIABLE = "OSWORLD_VIEWER_TOKEN"  # noqa: S105 - the variable's name, not a token
SERVER_TOKEN_VARIABLE = "ENV_SERVER_TOKEN"  # noqa: S105 - likewise
QUESTION_LIMIT_S = 15.0


class ViewerError(PipelineError):
    """The viewer cannot start, or cannot show the requested page."""


class NotFoundError(ViewerError):
    """The requested object is not in the store."""


class BadQuestionError(ViewerError):
    """A request that is not valid, or a query that takes too long or too much memory."""


class TooBusyError(ViewerError):
    """The maximum number of concurrent queries, live streams or pictures is reached."""


@dataclass(frozen=True, kw_only=True)
class ViewerSettings:
    state: StateDir
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0: any free port."""
    token: SecretStr | None = field(default=None)
    """A browser sends it once; a SecretStr is never shown in a log or a traceback."""
    mlflow_url: str = MLFLOW_URL
    """Address of MLflow's UI."""
    dagster_url: str = DAGSTER_URL
    """Address of Dagster's UI."""
    env_server_urls: Sequence[str] = ()
    """Addresses of the env servers whose desktops are shown live; one may stand for several servers
    (rollout/env_addresses.py)."""
    env_server_token: SecretStr | None = field(default=None)
    """It stays here: no answer to a browser contains it."""
    max_connections: int = 512
    """Further ones are answered with 503 at once."""
    slow_client_s: float = 10.0
    """Time limit for a request to arrive; then the connection is closed."""
    question_s: float = QUESTION_LIMIT_S
    """Time limit of a search in the models' text, or of a condition in SQL."""

    @property
    def is_open(self) -> bool:
        """No token is required: only programs on this machine are answered."""
        return self.token is None


def token_from(environment: Mapping[str, str] | None = None, variable: str = TOKEN_VARIABLE) -> SecretStr | None:
    """The token in the environment; an argument would be visible in process lists."""
    token = (os.environ if environment is None else environment).get(variable, "").strip()
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
