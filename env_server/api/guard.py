"""What every request passes first: the bearer token, compared in constant time; without one, that no page of another
site sent it; and the size and pace of its body. What leaves is counted on the way."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env_server.api.answers import error_answer
from env_server.settings import is_loopback

access_log = logging.getLogger("env_server.access")

OPEN_PATHS = ("/health", "/healthz", "/readyz", "/", "/status")
"""Counts without secrets: a load balancer asks them and knows no token. The status page holds nothing, and must be
there for a browser's user to type the token into."""
_FOREIGN = (
    "this server has no token, so it answers programs of this machine at an address of this machine, and no page of "
    "another site; start it with a token to reach it by other names"
)
BODY_BYTES_PER_S = 64 * 1024
"""The pace that a body must keep beyond its first seconds."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """One request that has been answered, or whose client went before."""

    method: str
    route: str
    """The route's own template, so that ids do not multiply it; empty where no route matched."""
    path: str
    status: int
    """499 where nothing was answered."""
    num_bytes: int
    seconds: float


class Guard:
    """`on_pass` hears of every request. `open_paths` need no token.

    A server without a token answers on loopback, where any page that is open in a browser of this machine reaches it:
    by the address itself, or by a name of the page's own site that points here. Such requests say where they come from,
    or to whom they are sent. A token needs no such check: no browser adds one by itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body_bytes: int,
        slow_client_s: float = 10.0,
        open_paths: tuple[str, ...] = OPEN_PATHS,
        on_pass: Callable[[Passed], None] = lambda _: None,
    ) -> None:
        self._app = app
        # Digests have one length, so not even the token's length can be measured.
        self._token_digest = None if token is None else _digest(token.encode())
        self._max_body_bytes, self._slow_client_s = max_body_bytes, slow_client_s
        self._open_paths, self._on_pass = open_paths, on_pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status, num_bytes = 499, 0

        async def counted(message: Any) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        finally:
            self._on_pass(
                Passed(
                    method=scope["method"], route=_route_of(scope), path=scope["path"], status=status,
                    num_bytes=num_bytes, seconds=time.perf_counter() - start,
                )
            )  # fmt: skip

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token_digest is None and not _is_from_here(headers):
            answer = error_answer(_FOREIGN, "client_error", 403, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        if not self._is_allowed(scope["path"], headers.get(b"authorization", b"")):
            sentence = "the token is missing or wrong; send the one that the server was started with"
            answer = error_answer(sentence, "client_error", 401, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._max_body_bytes:
            # Closed, or the rest of the body would have to be read for the sake of the next request.
            answer = error_answer(self._too_large, "client_error", 413, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the request is larger than {self._max_body_bytes} bytes; send less"

    def _is_allowed(self, path: str, authorization: bytes) -> bool:
        if self._token_digest is None or path in self._open_paths:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self._token_digest)

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes, is_body_over, start = 0, False, time.monotonic()

        async def bounded() -> Message:
            nonlocal num_bytes, is_body_over
            if is_body_over:
                return await receive()
            limit_s = self._slow_client_s + num_bytes / BODY_BYTES_PER_S
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + start + limit_s - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, f"the body was not there within {limit_s:.0f} s; send it faster", {"Connection": "close"}
                ) from error
            num_bytes += len(message.get("body", b""))
            is_body_over = not message.get("more_body", False)
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return bounded


def _is_from_here(headers: Mapping[bytes, bytes]) -> bool:
    """Sent to a name of this machine, by a program or by a page of this very server. Browsers always name a host."""
    host = headers.get(b"host", b"localhost")
    name = host.rpartition(b"]")[0].removeprefix(b"[") if host.startswith(b"[") else host.partition(b":")[0]
    return (
        is_loopback(name.decode("latin-1").lower())
        and headers.get(b"sec-fetch-site", b"none") in (b"same-origin", b"none")
        and headers.get(b"origin", b"http://" + host) == b"http://" + host
    )


def _route_of(scope: Scope) -> str:
    """The path with the names of its parameters in their places; a router knows its own part of it only."""
    if "route" not in scope:
        return ""
    names = {str(value): f"{{{name}}}" for name, value in scope.get("path_params", {}).items()}
    path: str = scope["path"]
    return "/".join(names.get(segment, segment) for segment in path.split("/")) if names else path


def log_access(passed: Passed) -> None:
    """Neither a query, which may name files, nor a header nor a body."""
    access_log.info(
        "%s %s %d %d bytes %.1f ms",
        passed.method, passed.path.encode("unicode_escape").decode()[:200], passed.status, passed.num_bytes,
        1000 * passed.seconds,
    )  # fmt: skip


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
