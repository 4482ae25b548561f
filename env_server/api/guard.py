"""What every request passes first: the bearer token, compared in constant time, and the size of its body."""

import hashlib
import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env_server.api.answers import error_answer

OPEN_PATHS = ("/health", "/healthz")
"""Counts without secrets: a load balancer asks them and knows no token."""


class Guard:
    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        # Digests have one length, so not even the token's length can be measured.
        self._token_digest = None if token is None else _digest(token.encode())
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not self._is_allowed(scope["path"], headers.get(b"authorization", b"")):
            sentence = "the token is missing or wrong; send the one that the server was started with"
            answer = error_answer(sentence, "client_error", 401, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            await error_answer(self._too_large, "client_error", 413)(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the request is larger than {self._max_body_bytes} bytes; send less"

    def _is_allowed(self, path: str, authorization: bytes) -> bool:
        if self._token_digest is None or path in OPEN_PATHS:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self._token_digest)

    def _counting(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
