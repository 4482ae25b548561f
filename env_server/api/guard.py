"""The checks that every request passes first: its bearer token, compared in constant time, or, if the server has no
token, that the request comes from this machine and not from a page of another site; then the size and rate of its
body. Bytes sent are counted."""

import logging
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from env_server.api.answers import error_answer
from env_server.metrics import Passed
from osworld_pipeline.wire.bearer import Secret, bearer_of
from osworld_pipeline.wire.bodies import BodyLimits
from osworld_pipeline.wire.cross_site import is_from_here, is_from_program
from osworld_pipeline.wire.run_tokens import why_invalid
from osworld_pipeline.wire.tracing import served_span
from osworld_pipeline.wire.traffic import Traffic

access_log = logging.getLogger("env_server.access")

OPEN_PATHS = ("/health", "/healthz", "/readyz", "/", "/status", "/docs")
"""Paths without secrets: a load balancer requests them and has no token. The pages for a browser contain no data, and
must be reachable for their user to enter the token."""
NOT_BY_RUNS = (re.compile(r"/v1/server/(cordon|drain)"), re.compile(r"/v1/episodes/[^/]+/person/.*"))
"""Paths that a run's token does not open: they are for the people who run the server."""
_FOREIGN = (
    "this server has no token, so it answers only programs on this machine that use a loopback address, and no page of "
    "another site; start it with a token to reach it by other names"
)
_BROWSER = "this port answers programs at the allowed addresses, and no browser"


class Guard:
    """`on_pass` is called for every request. `open_paths` need no token. A server without a token answers only requests
    from this machine; with `has_address_list`, which controls access by itself, it answers every program, but no
    browser (wire/cross_site.py). If there is a token, these checks are not needed, because no browser sends a token by
    itself."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        body: BodyLimits,
        has_address_list: bool = False,
        open_paths: tuple[str, ...] = OPEN_PATHS,
        on_pass: Callable[[Passed], None] = lambda _: None,
    ) -> None:
        self._app, self._body = app, body
        self._secret, self._token = token, None if token is None else Secret(token)
        self._open_paths, self._on_pass = open_paths, on_pass
        self._admits, self._foreign = (is_from_program, _BROWSER) if has_address_list else (is_from_here, _FOREIGN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traffic = Traffic(receive, send)
        try:
            await self._pass(scope, traffic.receive, traffic.send)
        finally:
            self._on_pass(
                Passed(
                    method=scope["method"], route=_route_of(scope), path=scope["path"], status=traffic.status,
                    num_bytes=traffic.num_sent, seconds=traffic.seconds,
                )
            )  # fmt: skip

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is None and not self._admits(headers):
            answer = error_answer(self._foreign, "client_error", 403, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        if refusal := self._why_refused(scope["path"], headers.get(b"authorization", b"")):
            await refusal(scope, receive, send)
            return
        if not self._body.allows(headers):
            answer = error_answer(self._body.too_large, "client_error", 413, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        with served_span(scope["method"], headers) as traced:
            await self._app(scope, self._body.bounded(receive), send)
            if traced is not None:
                traced.update_name(f"{scope['method']} {_route_of(scope)}")

    def _why_refused(self, path: str, authorization: bytes) -> ASGIApp | None:
        """None if the request is allowed; else the answer that refuses it."""
        if self._token is None or self._secret is None or path in self._open_paths or self._token.is_in(authorization):
            return None
        reason = why_invalid(self._secret, bearer_of(authorization))
        if reason is None:
            if any(pattern.fullmatch(path) for pattern in NOT_BY_RUNS):
                sentence = "the token of a run does not allow this; send the one that the server was started with"
                return error_answer(sentence, "client_error", 403)
            return None
        sentence = reason or "the token is missing or wrong; send the one that the server was started with"
        return error_answer(sentence, "client_error", 401, {"WWW-Authenticate": "Bearer"})


def _route_of(scope: Scope) -> str:
    """The path with its parameters replaced by their names; a mounted router reports only its own part of the path."""
    if "route" not in scope:
        return ""
    names = {str(value): f"{{{name}}}" for name, value in scope.get("path_params", {}).items()}
    path: str = scope["path"]
    return "/".join(names.get(segment, segment) for segment in path.split("/")) if names else path


def log_access(passed: Passed) -> None:
    """Logs no query, which may name files, and neither headers nor bodies."""
    access_log.info(
        "%s %s %d %d bytes %.1f ms",
        passed.method, passed.path.encode("unicode_escape").decode()[:200], passed.status, passed.num_bytes,
        1000 * passed.seconds,
    )  # fmt: skip
