"""Runs the viewer until it is told to stop."""

import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from osworld_pipeline.viewer.app import create_app
from osworld_pipeline.viewer.settings import ViewerError, ViewerSettings, need_token

SHUTDOWN_GRACE_S = 2
MAX_CONCURRENT = 256


def bind(settings: ViewerSettings) -> socket.socket:
    """
    Raises:
        ViewerError: the port is taken, or not for us; or a network would be served without a token.
    """
    need_token(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay (40 ms an answer) off only for sockets that name it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ViewerError(
            f"cannot listen on {settings.host}:{settings.port} ({reason}): another viewer may be open there; choose "
            "another --port, or 0 for any"
        ) from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{shown}:{listener.getsockname()[1]}"


def serve(
    settings: ViewerSettings, *, path: str = "/", say: Callable[[str], None] = print, opens_browser: bool = False
) -> None:
    """Serves until Ctrl-C or TERM; says its address once it listens.

    Raises:
        ViewerError: as `bind`.
    """
    with bind(settings) as listener:
        url = url_of(settings.host, listener)
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            ws="none",
            proxy_headers=False,  # whoever is on this machine could name any address by them
            access_log=False,  # an address may hold a token
            log_config=None,
            limit_concurrency=MAX_CONCURRENT,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            server_header=False,
        )

        def ready() -> None:
            say(f"trajectory viewer: {url}{path}  (Ctrl-C ends it)")
            if opens_browser:
                # In a thread of its own: a browser of the terminal does not return before it is left.
                threading.Thread(target=webbrowser.open, args=(url + path,), daemon=True).start()

        _Server(config, ready).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ctrl-C ends it without a traceback: uvicorn would raise the signal again after the shutdown."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
