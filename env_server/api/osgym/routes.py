"""The OSGym endpoints: /reset, /step, /shutdown and /screenshot, as its state manager answers them.

Failures are 400 `{message}`, with the `fault` in addition; a full server is 503, a refused address 403, and a bug of
the server 500. A lost desktop or a crashed grader is a failure, and never a reward of zero. An episode whose policy
disabled its desktop is finished, with a reward of zero. The client retries failures immediately and without limit, so
answers with 400 and 503 are delayed. The client stops only when the answer changes: see worker.py."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StrictInt
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from env_server.api.answers import screenshot_answer, to_json
from env_server.api.faults import ANSWERS
from env_server.api.opening import CLIENT_CLOSED_REQUEST, client_of
from env_server.api.osgym.worker import OsgymWorker
from env_server.api.quick_route import QuickRoute
from env_server.episodes.table import EpisodeTable
from env_server.settings import Settings
from osworld_pipeline.errors import NoCapacityError, PipelineError
from osworld_pipeline.wire import Fault, Message
from osworld_pipeline.wire.faults import classify
from osworld_pipeline.wire.waiting import while_connected

FAILURE_PACE_S = 0.5
"""Delay before a failure is answered, because the client retries at once."""
MAX_TIMEOUT_S = 7 * 24 * 3600

Network = IPv4Network | IPv6Network


class OsgymReset(Message):
    task_config: dict[str, Any]
    timeout: float = Field(gt=0, le=MAX_TIMEOUT_S)
    """Seconds without use after which the VM is closed."""


class OsgymResetAnswer(Message):
    screenshot: str
    """PNG, base64."""
    problem: str
    vm_id: int


class OsgymStep(Message):
    action: str
    vm_id: StrictInt
    step: int | None = Field(default=None, ge=1)
    """An extension of OSGym's protocol: the number of this step, counted from 1; a step with a number may be sent
    again."""


class OsgymStepAnswer(Message):
    screenshot: str
    is_finish: bool
    reward: float
    message: str | None = None
    """An extension of OSGym's protocol: why the action was run as wait(), or why the episode ended as tampering."""


class OsgymShutdown(Message):
    vm_id: StrictInt | Literal["all"]


class OsgymScreenshotAnswer(Message):
    screenshot: str
    vm_id: int


class OsgymFailure(Message):
    message: str
    fault: Fault


def osgym_app(
    episodes: EpisodeTable,
    settings: Settings,
    *,
    port: int | None = None,
    on_fault: Callable[[Fault], None] = lambda _: None,
) -> FastAPI:
    """The API of a worker: of one port, with its share of the desktops, or of the main port if `port` is None."""
    worker = OsgymWorker(
        episodes,
        name="the main port" if port is None else f"port {port}",
        max_vms=None if port is None else settings.osgym.replicas_per_port,
        pause_s=settings.osgym.pause_s,
        queue_timeout_s=settings.queue_timeout_s,
    )
    return create_osgym_app(
        worker, retry_after_s=episodes.pool.retry_after_s, allowed=settings.osgym_allowed_ips, on_fault=on_fault
    )


def create_osgym_app(
    worker: OsgymWorker,
    *,
    retry_after_s: Callable[[], int],
    allowed: Sequence[Network] = (),
    failure_pace_s: float = FAILURE_PACE_S,
    on_fault: Callable[[Fault], None] = lambda _: None,
) -> FastAPI:
    """The API of one worker. `allowed` are the networks of its clients; if empty, every client is admitted."""
    app = FastAPI(title=f"OSWorld env server, OSGym surface ({worker.name})", docs_url=None, redoc_url=None)
    app.include_router(_router(worker))
    _add_failures(app, retry_after_s, failure_pace_s, on_fault)
    if allowed:
        app.add_middleware(AllowedAddresses, allowed=allowed)

    @app.get("/screenshot", response_model=OsgymScreenshotAnswer, tags=["OSGym"])
    async def screenshot(vm_id: Annotated[int, Query(alias="vmId")]) -> Response:
        """The screen as it is now."""
        image = await worker.screenshot(vm_id)
        return await screenshot_answer(image, lambda encoded: {"screenshot": encoded, "vm_id": vm_id})

    return app


def _router(worker: OsgymWorker) -> APIRouter:
    router = APIRouter(route_class=QuickRoute, tags=["OSGym"])

    @router.post("/reset", response_model=OsgymResetAnswer)
    async def reset(message: OsgymReset, request: Request) -> Response:
        """Opens a separate VM for the task; other VMs are not affected."""
        opened = await while_connected(
            request,
            worker.reset(message.task_config, timeout_s=message.timeout, client_id=client_of(request)),
            undo=lambda opened: worker.shutdown(opened[0]),
        )
        if opened is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        vm_id, observation = opened
        fields = {"problem": observation.instruction, "vm_id": vm_id}
        return await screenshot_answer(observation.screenshot, lambda encoded: {"screenshot": encoded, **fields})

    @router.post("/step", response_model=OsgymStepAnswer)
    async def step(message: OsgymStep) -> Response:
        """Executes one or several calls; a finished episode is graded and its VM closed."""
        reply = await worker.step(message.vm_id, message.action, number=message.step)
        fields: dict[str, Any] = {"is_finish": reply.is_finish, "reward": reply.reward}
        if reply.message:
            fields["message"] = reply.message
        return await screenshot_answer(reply.observation.screenshot, lambda encoded: {"screenshot": encoded, **fields})

    @router.post("/shutdown", response_model=OsgymShutdown)
    async def shutdown(message: OsgymShutdown, request: Request) -> OsgymShutdown:
        """`all` means every VM of this client's address at this worker."""
        if isinstance(message.vm_id, int):
            await worker.shutdown(message.vm_id)
        else:
            await worker.shutdown_all(client_of(request))
        return message

    return router


class AllowedAddresses:
    """Admits only clients that connect from one of the networks. Headers of a proxy are ignored, because any client can
    set them."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[Network]) -> None:
        self._app, self._allowed = app, tuple(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = scope["client"][0] if scope.get("client") else ""
        if scope["type"] != "http" or self._is_allowed(host):
            await self._app(scope, receive, send)
            return
        sentence = f"{host or 'this client'} is not among the addresses that may use this server; ask its operator"
        await _failure(sentence, "client_error", 403)(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._allowed)


def _add_failures(
    app: FastAPI, retry_after_s: Callable[[], int], pace_s: float, on_fault: Callable[[Fault], None]
) -> None:
    def answer_with(sentence: str, fault: Fault, status: int, headers: Mapping[str, str] | None = None) -> Response:
        on_fault(fault)
        return _failure(sentence, fault, status, headers)

    async def answer_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, PipelineError)
        fault = classify(error, ANSWERS).fault
        await asyncio.sleep(pace_s)
        if isinstance(error, NoCapacityError):
            return answer_with(str(error), fault, 503, {"Retry-After": str(retry_after_s())})
        return answer_with(str(error), fault, 400)

    async def answer_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        await asyncio.sleep(pace_s)
        return answer_with(f"the request is not valid at {where}: {first['msg']}", "client_error", 400)

    async def answer_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        fault: Fault = "client_error" if error.status_code < 500 else "env_fault"
        return answer_with(str(error.detail), fault, error.status_code, dict(error.headers or {}))

    async def answer_bug(_: Request, error: Exception) -> Response:
        sentence = f"the env server failed with {type(error).__name__}; its log has the traceback"
        return answer_with(sentence, "env_fault", 500)

    app.add_exception_handler(PipelineError, answer_known)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_bug)


def _failure(sentence: str, fault: Fault, status: int, headers: Mapping[str, str] | None = None) -> Response:
    body = to_json(OsgymFailure(message=sentence, fault=fault).model_dump())
    return Response(body, status_code=status, headers=headers, media_type="application/json")
