"""The env server's client: `protocols.Desktop` over HTTP, for one server or several in turn.

/reset may be tried again, because a reset that failed has changed nothing anyone depends on. /step and /evaluate are
sent once: a second one could act twice.
"""

import asyncio
import base64
import binascii
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import (
    ActionParseError,
    EngineError,
    EnvServerError,
    EvaluatorError,
    NoCapacityError,
    PipelineError,
    ReplicaError,
    SetupError,
)
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.wire import (
    EnvConfig,
    EvaluateAnswer,
    HealthAnswer,
    Message,
    ObservationMessage,
    ResetAnswer,
    ResetRequest,
    StepAnswer,
)

Answer = TypeVar("Answer", bound=Message)
BIG_ANSWER_BYTES = 64 * 1024
"""Answers from this size on are read in a thread: JSON and base64 of a screenshot would hold the event loop."""


@dataclass(frozen=True, kw_only=True)
class EnvTimeouts:
    connect_s: float = 5.0
    request_s: float = 120.0
    """One /reset, /step or /evaluate."""
    capacity_s: float = 300.0
    """How long /reset waits for a free replica, and for a server that is coming up."""
    close_s: float = 10.0


class EnvClient:
    """Connections to the env servers of a run; makes one HttpDesktop for each episode."""

    def __init__(
        self,
        base_urls: str | Sequence[str],
        *,
        token: str | None = None,
        env_config: EnvConfig | None = None,
        timeouts: EnvTimeouts | None = None,
        client_id: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_urls`: a comma-separated string, or a sequence. `transport` replaces the network in tests."""
        parts = base_urls.split(",") if isinstance(base_urls, str) else base_urls
        self.base_urls = tuple(url.strip().rstrip("/") for url in parts if url.strip())
        if not self.base_urls:
            raise EnvServerError("no env server address given; start one with: env-server --provider local")
        self.env_config = env_config or EnvConfig()
        self.timeouts = timeouts or EnvTimeouts()
        self.client_id = client_id
        self._next_url = itertools.cycle(self.base_urls)
        self._stragglers: set[asyncio.Future[None]] = set()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.timeouts.request_s, connect=self.timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            # A desktop is local or named outright; a proxy from the environment would only send it astray.
            trust_env=False,
        )

    def desktop(self) -> "HttpDesktop":
        """A desktop that is not reset yet, on the next server in turn."""
        return HttpDesktop(self, next(self._next_url))

    def another_url(self) -> str:
        return next(self._next_url)

    async def health(self) -> tuple[HealthAnswer, ...]:
        """Every server's word.

        Raises:
            EnvServerError: one of them is unreachable; names it.
        """
        return tuple([await self._health(url) for url in self.base_urls])

    async def close(self) -> None:
        """Waits (within the request's own limit) for replicas still being given back."""
        if self._stragglers:
            await asyncio.wait(self._stragglers, timeout=self.timeouts.close_s)
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, base_url: str, path: str, body: Mapping[str, Any], answer: type[Answer]) -> Answer:
        """One POST. Raises the error its failure stands for."""
        url = f"{base_url}{path}"
        try:
            response = await self._http.post(url, json=dict(body))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(unreachable(base_url)) from error
        except httpx.TimeoutException as error:
            kind = EvaluatorError if path == "/evaluate" else ReplicaError
            raise kind(f"{url} did not answer within {self.timeouts.request_s:g} s") from error
        except httpx.TransportError as error:
            raise ReplicaError(f"the connection to {url} broke: {error or type(error).__name__}") from error
        if response.status_code != httpx.codes.OK:
            raise _error_of(path, base_url, response)
        try:
            if len(response.content) < BIG_ANSWER_BYTES:
                return _read_answer(answer, response.content, path)
            return await asyncio.to_thread(_read_answer, answer, response.content, path)
        except ValidationError as error:
            raise EnvServerError(
                f"{url} answered what is no {answer.__name__}: {error.errors()[0]['msg']}; is this an env server?"
            ) from error

    async def close_episode(self, base_url: str, episode_id: str) -> None:
        """Gives the replica back; failing to is the server's idle reaper's business."""
        try:
            await self._http.post(
                f"{base_url}/close", json={"episode_id": episode_id}, timeout=httpx.Timeout(self.timeouts.close_s)
            )
        except (httpx.HTTPError, RuntimeError):
            # RuntimeError: the client was closed before the desktop.
            return

    def close_when_done(self, base_url: str, pending: "asyncio.Future[ResetAnswer]") -> None:
        async def give_back() -> None:
            try:
                answer = await pending
            except PipelineError:
                return
            await self.close_episode(base_url, answer.episode_id)

        straggler = asyncio.ensure_future(give_back())
        self._stragglers.add(straggler)
        straggler.add_done_callback(self._stragglers.discard)

    async def _health(self, base_url: str) -> HealthAnswer:
        try:
            response = await self._http.get(f"{base_url}/health")
            response.raise_for_status()
            return HealthAnswer.model_validate_json(response.content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(unreachable(base_url)) from error
        except (httpx.HTTPError, ValidationError) as error:
            raise EnvServerError(f"{base_url}/health did not answer as an env server does: {error}") from error


class UnreachableError(EnvServerError):
    """Nothing listens there (yet)."""


class BusyError(NoCapacityError):
    """No free replica just now; `retry_after_s` is the server's own estimate."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def unreachable(base_url: str) -> str:
    return f"no env server answers at {base_url}; start one with: env-server --provider local"


class HttpDesktop:
    """One episode's desktop. Single use: reset once, then act, score, close."""

    def __init__(self, client: EnvClient, base_url: str) -> None:
        self._client = client
        self._base_url = base_url
        self._episode_id: str | None = None

    async def reset(self, task: Task) -> tuple[Observation, DesktopInfo]:
        """Waits for a free replica within `capacity_s`, trying the servers in turn.

        Raises:
            NoCapacityError, EnvServerError: none became free, or no server answered, within the limit.
            SetupError, ReplicaError: the task could not be set up, or its replica died.
        """
        assert self._episode_id is None, "a desktop is reset once"
        request = ResetRequest(
            task_config=dict(task.config), env_config=self._client.env_config, client_id=self._client.client_id
        ).model_dump(mode="json", exclude_none=True)
        answer = await self._reset_within_limit(request)
        self._episode_id = answer.episode_id
        info = DesktopInfo(
            replica_id=answer.replica_id,
            provider=answer.provider,
            image_digest=answer.image_digest,
            grader_version=answer.grader_version,
        )
        return await _observation(answer), info

    async def _reset_within_limit(self, request: dict[str, Any]) -> ResetAnswer:
        deadline = time.monotonic() + self._client.timeouts.capacity_s
        for attempt in itertools.count():
            try:
                return await self._reset_or_give_back(request)
            except (BusyError, UnreachableError) as error:
                asked_s = error.retry_after_s if isinstance(error, BusyError) else None
                # Jitter keeps the episodes of a group from coming back all at once.
                wait_s = (asked_s or min(5.0, 0.25 * 2 ** min(attempt, 5))) * random.uniform(0.75, 1.25)
                if time.monotonic() + wait_s > deadline:
                    raise
                self._base_url = self._client.another_url()
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    async def _reset_or_give_back(self, request: dict[str, Any]) -> ResetAnswer:
        """One /reset. Where its caller is cancelled meanwhile, the replica it may still get is given back."""
        base_url = self._base_url
        pending = asyncio.ensure_future(self._client.send(base_url, "/reset", request, ResetAnswer))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            self._client.close_when_done(base_url, pending)
            raise

    async def act(self, command: str, *, pause_s: float) -> Observation:
        body = {"episode_id": self._live_id(), "action": command, "pause": pause_s}
        return await _observation(await self._client.send(self._base_url, "/step", body, StepAnswer))

    async def score(self) -> float:
        answer = await self._client.send(self._base_url, "/evaluate", {"episode_id": self._live_id()}, EvaluateAnswer)
        if not 0.0 <= answer.reward <= 1.0:
            raise EvaluatorError(f"the grader at {self._base_url} answered {answer.reward}, outside 0..1")
        return answer.reward

    async def close(self) -> None:
        episode_id, self._episode_id = self._episode_id, None
        if episode_id is not None:
            # Shielded, so that a cancelled episode still gives its replica back.
            await asyncio.shield(self._client.close_episode(self._base_url, episode_id))

    def _live_id(self) -> str:
        assert self._episode_id is not None, "reset comes first"
        return self._episode_id


def _read_answer(answer: type[Answer], content: bytes, path: str) -> Answer:
    if path == "/evaluate":
        # Slime's own server reports a crashed evaluator as reward 0.0 beside an `error`.
        problem = _json_object(content).get("error")
        if problem:
            raise EvaluatorError(f"the evaluator crashed: {problem}")
    return answer.model_validate_json(content)


async def _observation(message: ObservationMessage) -> Observation:
    encoded = message.screenshot_base64
    try:
        if len(encoded) < BIG_ANSWER_BYTES:
            screenshot = base64.b64decode(encoded, validate=True)
        else:
            screenshot = await asyncio.to_thread(base64.b64decode, encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReplicaError("the env server sent a screenshot that is not base64") from error
    return Observation(
        screenshot=screenshot,
        image_format=message.screenshot_format,
        accessibility_tree=message.accessibility_tree,
        terminal=message.terminal,
        instruction=message.instruction,
    )


_FAULTS: dict[str, type[PipelineError]] = {
    "grader_fault": EvaluatorError,
    "policy_fault": EngineError,
}


def _error_of(path: str, base_url: str, response: httpx.Response) -> PipelineError:
    """The error a failed answer stands for, by its fault where it names one, else by status and path."""
    body = _json_object(response.content)
    sentence = str(body.get("error") or body.get("detail") or response.reason_phrase or "no reason given")[:2000]
    where = f"{base_url}{path}"
    status = response.status_code
    if status == httpx.codes.SERVICE_UNAVAILABLE or body.get("fault") == "no_capacity":
        return BusyError(f"{where} has no free replica: {sentence}", retry_after_s=_retry_after_s(response))
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return EnvServerError(f"{where} refused the token: set ENV_SERVER_TOKEN to the one the server was started with")
    if status == httpx.codes.NOT_FOUND and path != "/reset":
        return ReplicaError(f"{where}: {sentence}")
    fault = body.get("fault")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        default = EvaluatorError if path == "/evaluate" and fault is None else ReplicaError
        return _FAULTS.get(str(fault), default)(sentence)
    if path == "/step" and status == httpx.codes.BAD_REQUEST:
        return ActionParseError(sentence)
    if path == "/reset" and status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
        return SetupError(f"{where} refused the task: {sentence}")
    return EnvServerError(f"{where} answered {status}: {sentence}")


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return min(60.0, max(0.1, float(response.headers.get("Retry-After", ""))))
    except ValueError:
        return None


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
