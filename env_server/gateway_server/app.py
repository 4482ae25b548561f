"""The gateway's calls as a FastAPI application; the package's docstring lists them."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import httpx
from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse

from env_server.api.guard import Guard
from env_server.gateway_server.faults import Faults, FaultShares
from env_server.gateway_server.sandboxes import GoneError, HeldSandbox, QuotaError, SandboxTable
from env_server.providers.gateway.https_client import ORIGIN_HEADER, REQUEST_HEADER, SESSION_HEADER
from osworld_pipeline.errors import DependencyError, ReplicaError
from osworld_pipeline.wire.bodies import BodyLimits

GUEST_LIMIT_S = 3600.0
"""Time limit of one call to a guest; the client has its own limit, and a command may set one up to this."""
MAX_BODY_BYTES = 512 * 1024 * 1024

Session = Annotated[str, Header(alias=SESSION_HEADER)]
RequestId = Annotated[str, Header(alias=REQUEST_HEADER, max_length=200)]


def create_gateway(
    sandboxes: SandboxTable,
    *,
    token: str | None,
    retry_after_s: float = 5.0,
    faults: Faults | None = None,
) -> FastAPI:
    """The caller closes the provider; the sandboxes are stopped with the application."""
    faults = faults or Faults(FaultShares())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(sandboxes.run_reaper())
        try:
            yield
        finally:
            reaper.cancel()
            with suppress(asyncio.CancelledError):
                await reaper
            await sandboxes.close()

    app = FastAPI(title="OSWorld sandbox gateway", lifespan=lifespan, openapi_url=None)
    _add_error_answers(app, retry_after_s)

    async def carry_out(work: Callable[[], Awaitable[Response]]) -> Response:
        """Executes the call, or the injected fault that was drawn for it."""
        fault = await faults.draw()
        if fault == "busy":
            return _error(429, "the gateway is too busy (an injected fault)", _retry_after(retry_after_s))
        if fault == "fail":
            return _error(502, "the call was not passed on (an injected fault)")
        answer = await work()
        return _error(502, "the answer was lost (an injected fault)") if fault == "lose" else answer

    @app.post("/v1/sandboxes")
    async def start(request_id: RequestId = "") -> Response:
        async def work() -> Response:
            return JSONResponse(_sandbox_fields(await sandboxes.start(request_id), sandboxes), 201)

        return await carry_out(work)

    @app.post("/v1/sandboxes/{sandbox_id}/session")
    async def refresh(sandbox_id: str, session: Session = "") -> Response:
        async def work() -> Response:
            held = sandboxes.find(sandbox_id, session)
            held.renew(session)
            return JSONResponse(_sandbox_fields(held, sandboxes))

        return await carry_out(work)

    @app.delete("/v1/sandboxes/{sandbox_id}")
    async def stop(sandbox_id: str, session: Session = "") -> Response:
        async def work() -> Response:
            await sandboxes.stop(sandbox_id, session)
            return Response(status_code=204)

        return await carry_out(work)

    @app.api_route("/v1/sandboxes/{sandbox_id}/guest/{path:path}", methods=["GET", "POST"])
    async def guest(
        sandbox_id: str, path: str, request: Request, session: Session = "", request_id: RequestId = ""
    ) -> Response:
        body = await request.body()

        async def work() -> Response:
            target = f"/{path}" + (f"?{request.url.query}" if request.url.query else "")
            answer = await sandboxes.find(sandbox_id, session).ask(
                request.method,
                target,
                body=body,
                content_type=request.headers.get("content-type", ""),
                request_id=request_id,
                limit_s=GUEST_LIMIT_S,
            )
            headers = {ORIGIN_HEADER: "guest"}
            return Response(answer.body, answer.status, headers, answer.content_type or None)

        return await carry_out(work)

    @app.get("/healthz")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "taken": sandboxes.num_taken,
            "quota": sandboxes.quota,
            "started": sandboxes.num_started,
            "refused": sandboxes.num_refused,
            "reaped": sandboxes.num_reaped,
            "faults": dict(faults.num_made),
        }

    app.add_middleware(Guard, token=token, body=BodyLimits(max_bytes=MAX_BODY_BYTES), open_paths=("/healthz",))
    return app


def _sandbox_fields(held: HeldSandbox, sandboxes: SandboxTable) -> dict[str, Any]:
    return {
        "sandbox_id": held.sandbox_id,
        "session_id": held.session_id,
        "lifetime_s": sandboxes.lifetime_s,
        "image_digest": sandboxes.provider.image_digest,
        "details": sandboxes.provider.name,
    }


def _add_error_answers(app: FastAPI, retry_after_s: float) -> None:
    @app.exception_handler(QuotaError)
    async def over_quota(_: Request, error: QuotaError) -> Response:
        return _error(429, str(error), _retry_after(retry_after_s))

    @app.exception_handler(GoneError)
    async def gone(_: Request, error: GoneError) -> Response:
        return _error(410, str(error))

    @app.exception_handler(ReplicaError)
    async def failed(_: Request, error: ReplicaError) -> Response:
        return _error(502, str(error))

    @app.exception_handler(DependencyError)
    async def impossible(_: Request, error: DependencyError) -> Response:
        return _error(500, str(error))

    @app.exception_handler(httpx.HTTPError)
    async def silent(_: Request, error: httpx.HTTPError) -> Response:
        return _error(502, f"the guest cannot be reached ({type(error).__name__})")

    @app.exception_handler(TimeoutError)
    async def too_long(_: Request, error: TimeoutError) -> Response:
        return _error(504, "the call timed out")


def _error(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)


def _retry_after(seconds: float) -> dict[str, str]:
    """Whole seconds, as HTTP requires, and at least one."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
