"""`osworld-pipeline receive-weights`: takes weights over HTTP and stores them on the disk of the machine, where its
sglang servers load them.

| request | answer |
|---|---|
| `GET /v1/weights/{name}` | `{"path": ...}` of complete weights, or 404 |
| `PUT /v1/uploads/{upload}/{file}` | `{"crc32": ...}` of the body |
| `POST /v1/uploads/{upload}` with `{"name": ..., "files": {file: bytes}}` | `{"path": ...}`; the upload is complete |
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from osworld_pipeline.errors import EngineError
from osworld_pipeline.policy_servers.received_weights import ReceivedWeights, RefusedError
from osworld_pipeline.wire.bearer import Secret
from osworld_pipeline.wire.bodies import BodyLimits
from osworld_pipeline.wire.connections import ConnectionLimits, bounded_config
from osworld_pipeline.wire.cross_site import is_from_here, is_loopback
from osworld_pipeline.wire.interruptible import InterruptibleServer
from osworld_pipeline.wire.listening import listen_on, url_of
from osworld_pipeline.wire.server_metrics import observed_server

TOKEN_VARIABLE = "ENGINE_TOKEN"  # noqa: S105 - the variable's name, not a token
MAX_FILE_BYTES = 1 << 40
MAX_MESSAGE_BYTES = 1 << 20
LIMITS = ConnectionLimits(max_connections=256, slow_client_s=30.0, keep_alive_s=60.0)


def serve(root: Path, *, host: str, port: int, keep: int, token: str | None, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. `token`: that of the sglang servers. `on_ready`: called with its URL.

    Raises:
        EngineError: the port or the folder cannot be used, or a network would be served without a token.
    """
    if token is None and not is_loopback(host):
        raise EngineError(f"any host could store weights at {host}: set {TOKEN_VARIABLE} to the sglang servers' token")
    weights = ReceivedWeights(root=root, keep=keep)
    weights.open()
    try:
        listener = listen_on(host, port)
    except (OSError, OverflowError) as error:
        raise EngineError(f"cannot listen on {host}:{port} ({error}): choose another --port") from error
    with listener:
        url = url_of(host, listener)
        with observed_server(create_app(weights, token)) as observed:
            config = bounded_config(observed.app, LIMITS, shutdown_grace_s=2)
            InterruptibleServer(config, lambda: on_ready(url)).run(sockets=[listener])


def create_app(weights: ReceivedWeights, token: str | None) -> ASGIApp:
    """The whole application, guard included."""

    async def find(request: Request) -> Response:
        folder = await asyncio.to_thread(weights.find, request.path_params["name"])
        if folder is None:
            raise HTTPException(404, "there are no such weights")
        return JSONResponse({"path": str(folder)})

    async def write(request: Request) -> Response:
        checksum = await weights.write(request.path_params["upload"], request.path_params["file"], request.stream())
        return JSONResponse({"crc32": checksum})

    async def complete(request: Request) -> Response:
        name, files = _announced(await request.body())
        folder = await asyncio.to_thread(weights.complete, name, request.path_params["upload"], files)
        return JSONResponse({"path": str(folder)})

    routes = [
        Route("/v1/weights/{name}", find, methods=["GET"]),
        Route("/v1/uploads/{upload}/{file}", write, methods=["PUT"]),
        Route("/v1/uploads/{upload}", complete, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _answer_of(lambda error: (error.status_code, error.detail)),
            RefusedError: _answer_of(lambda error: (400, str(error))),
            OSError: _answer_of(lambda error: (507, f"the weights cannot be stored: {error}")),
        },
    )
    return _guarded(app, None if token is None else Secret(token))


def _announced(body: bytes) -> tuple[str, dict[str, int]]:
    try:
        message = orjson.loads(body)
        return str(message["name"]), {str(name): int(size) for name, size in message["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"the request that completes an upload needs `name` and `files` ({error})") from error


def _answer_of(describe: Callable[[Any], tuple[int, str]]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(_: Request, error: Exception) -> Response:
        status, sentence = describe(error)
        return JSONResponse({"error": {"message": sentence}}, status_code=status, headers={"Connection": "close"})

    return answer


def _guarded(app: ASGIApp, secret: Secret | None) -> ASGIApp:
    """Checks the token before a body is read; if `secret` is None, only programs of this machine are answered."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        is_allowed = is_from_here(headers) if secret is None else secret.is_in(headers.get(b"authorization", b""))
        limits = BodyLimits(max_bytes=MAX_FILE_BYTES if scope["method"] == "PUT" else MAX_MESSAGE_BYTES)
        if not is_allowed:
            local = f"only programs of this machine are answered, because the receiver has no {TOKEN_VARIABLE}"
            message = "the token is missing or wrong" if secret else local
            refusal = JSONResponse({"error": {"message": message}}, status_code=401, headers={"Connection": "close"})
            await refusal(scope, receive, send)
        elif not limits.allows(headers):
            refusal = JSONResponse({"error": {"message": limits.too_large}}, status_code=413)
            await refusal(scope, receive, send)
        else:
            await app(scope, limits.bounded(receive), send)

    return guarded


def token_from() -> str | None:
    return os.environ.get(TOKEN_VARIABLE) or None
