"""Run the viewer until it is stopped."""

import logging
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from starlette.types import ASGIApp

from osworld_pipeline.errors import StoreError
from osworld_pipeline.process_files import metrics_target
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.settings import ViewerError, ViewerSettings, need_token
from osworld_pipeline.wire.connections import ConnectionLimits, bounded_config
from osworld_pipeline.wire.interruptible import InterruptibleServer
from osworld_pipeline.wire.listening import listen_on, url_of
from osworld_pipeline.wire.server_metrics import observed_server

log = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 2


def bind(settings: ViewerSettings) -> socket.socket:
    """
    Raises:
        ViewerError: the port is in use or not permitted; or a network would be served without a token.
    """
    need_token(settings)
    try:
        return listen_on(settings.host, settings.port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ViewerError(
            f"cannot listen on {settings.host}:{settings.port} ({reason}): another viewer may be running there; choose "
            "another --port, or 0 for any"
        ) from error


def serve(
    settings: ViewerSettings, *, on_ready: Callable[[str], None], path: str = "/", opens_browser: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready`: called with the URL of `path` once it listens.

    Raises:
        ViewerError: as `bind`.
        StoreError: as EpisodeIndex.
        MetricsSettingError: OSWORLD_METRICS is not valid.
        PipelineError: an address of env servers is not valid.
    """
    app = create_app(settings, is_ending=lambda: server.should_exit)
    with bind(settings) as listener, _observed_app(app, settings) as observed:
        url = url_of(settings.host, listener)

        def ready() -> None:
            on_ready(url + path)
            if opens_browser:
                # In a separate thread: a text browser returns only when it is closed.
                threading.Thread(target=webbrowser.open, args=(url + path,), daemon=True).start()

        server = make_server(observed, settings, ready)
        server.run(sockets=[listener])


@contextmanager
def _observed_app(app: ASGIApp, settings: ViewerSettings) -> Iterator[ASGIApp]:
    """A state that is read-only has no file for Prometheus with the address of the metrics."""
    with observed_server(app) as observed, ExitStack() as stack:
        if observed.target:
            folder, labels = settings.state.metrics_targets, {"program": "viewer", "host": socket.gethostname()}
            try:
                stack.enter_context(metrics_target(folder, "viewer", observed.target, labels))
            except StoreError as error:
                log.warning("no file with this viewer's metrics address was written for Prometheus: %s", error)
        yield observed.app


def make_server(app: ASGIApp, settings: ViewerSettings, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """`ready` is called once it listens."""
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        slow_client_s=settings.slow_client_s,
        keep_alive_s=settings.slow_client_s,
    )
    return InterruptibleServer(bounded_config(app, limits, shutdown_grace_s=SHUTDOWN_GRACE_S), ready)
