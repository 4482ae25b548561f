"""The env server's client: `protocols.Desktop` over HTTP, for one server or several in rotation.

With our server, resets have ids, steps have numbers and evaluations are cached. A call whose answer was lost (a broken
connection, a timeout, a gateway's error) is therefore retried for a while and still executed only once. For a server
that does not report this, a call is sent once, because a retry could act twice.
"""

import asyncio
import itertools
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx
from pydantic import ValidationError

from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.shown_commands import ENV_SERVER, shell_line
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EnvServerError, EvaluatorError, PipelineError, ReplicaError
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.rollout.env_answers import (
    BIG_ANSWER_BYTES,
    Answer,
    BusyError,
    LostAnswerError,
    UnreachableError,
    error_of,
    json_object,
    read_answer,
    read_observation,
    unreachable,
)
from osworld_pipeline.wire import (
    MAX_NOTE,
    MAX_RECORD_ID,
    EnvConfig,
    EvaluateAnswer,
    HealthAnswer,
    NextInputAnswer,
    ObservationMessage,
    ResetAnswer,
    ResetRequest,
    StepAnswer,
)

GATEWAY_ERRORS = (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT)
"""Returned by a proxy that lost the server's answer."""


@dataclass(frozen=True, kw_only=True)
class EnvTimeouts:
    connect_s: float = 5.0
    request_s: float = 120.0
    """Limit of one /reset, /step or /evaluate."""
    capacity_s: float = 300.0
    """How long /reset waits for a free replica, and for a server that is starting."""
    close_s: float = 10.0
    resend_s: float = 20.0
    """How long a call whose answer was lost is retried."""


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
        settle: Settle = "fixed",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_urls`: a comma-separated string, or a sequence. `settle`: how steps pause; a server without this option
        makes the full pause. `transport` replaces the network in tests."""
        parts = base_urls.split(",") if isinstance(base_urls, str) else base_urls
        self.base_urls = tuple(url.strip().rstrip("/") for url in parts if url.strip())
        if not self.base_urls:
            raise EnvServerError(
                f"no env server address given; start one with: {shell_line(ENV_SERVER, '--provider', 'local')}"
            )
        self.env_config = env_config or EnvConfig()
        self.timeouts = timeouts or EnvTimeouts()
        self.client_id = client_id
        self.settle: Settle = settle
        self._next_url = itertools.cycle(self.base_urls)
        self._stragglers: set[asyncio.Future[None]] = set()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.timeouts.request_s, connect=self.timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            # A desktop is local or has an explicit address; a proxy from the environment would be wrong.
            trust_env=False,
        )

    def desktop(self) -> "HttpDesktop":
        """A desktop that is not reset yet, on the next server in rotation."""
        return HttpDesktop(self, next(self._next_url))

    def another_url(self) -> str:
        return next(self._next_url)

    async def health(self) -> tuple[HealthAnswer, ...]:
        """The health answer of every server.

        Raises:
            EnvServerError: a server is unreachable; names it.
        """
        return tuple([await self._health(url) for url in self.base_urls])

    async def describe(self) -> tuple[dict[str, Any] | None, ...]:
        """The description of every server (version, image_digest, grader_version, ...); None if it has none."""
        return tuple([await self._describe(url) for url in self.base_urls])

    async def close_left_over(self) -> int:
        """Releases the desktops of live episodes with this client's name, and returns their number. Call it before the
        first episode, if no other live process has the name. Servers that do not list their episodes are skipped; there
        the episodes end after the idle timeout.

        Raises:
            EnvServerError: a server is unreachable; names it.
        """
        left = [(url, episode_id) for url in self.base_urls for episode_id in await self._own_episodes(url)]
        for url, episode_id in left:
            await self.close_episode(url, episode_id)
        return len(left)

    async def close(self) -> None:
        """Waits (within the request's own limit) for replicas that are still being released."""
        if self._stragglers:
            await asyncio.wait(self._stragglers, timeout=self.timeouts.close_s)
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(
        self, base_url: str, path: str, body: Mapping[str, Any], answer: type[Answer], *, can_resend: bool
    ) -> Answer:
        """Sends one call, and retries within `resend_s` while its answer is lost, if that is safe. Raises the error of
        its failure."""
        give_up_at = math.inf
        for attempt in itertools.count():
            left_s = give_up_at - time.monotonic()
            try:
                return await self._send_once(base_url, path, body, answer, min(self.timeouts.request_s, left_s))
            except LostAnswerError as lost:
                if not can_resend:
                    raise lost.meaning from lost
                give_up_at = min(give_up_at, time.monotonic() + self.timeouts.resend_s)
                wait_s = _backoff_s(attempt)
                if time.monotonic() + wait_s >= give_up_at:
                    raise lost.meaning from lost
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    async def can_resend(self, base_url: str) -> bool:
        """Whether the server reports that a reset with an id may be sent again."""
        try:
            return (await self._health(base_url)).can_resend
        except EnvServerError:
            return False

    async def _send_once(
        self, base_url: str, path: str, body: Mapping[str, Any], answer: type[Answer], timeout_s: float
    ) -> Answer:
        url = f"{base_url}{path}"
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self.timeouts.connect_s))
        try:
            response = await self._http.post(url, json=dict(body), timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise LostAnswerError(UnreachableError(unreachable(base_url))) from error
        except httpx.TimeoutException as error:
            kind = EvaluatorError if path == "/evaluate" else ReplicaError
            raise LostAnswerError(kind(f"{url} did not answer within {timeout_s:.3g} s")) from error
        except httpx.TransportError as error:
            broken = ReplicaError(f"the connection to {url} broke: {error or type(error).__name__}")
            raise LostAnswerError(broken) from error
        if response.status_code in GATEWAY_ERRORS and "fault" not in json_object(response.content):
            raise LostAnswerError(error_of(path, base_url, response))
        if response.status_code != httpx.codes.OK:
            raise error_of(path, base_url, response)
        try:
            if len(response.content) < BIG_ANSWER_BYTES:
                return read_answer(answer, response.content, path)
            return await asyncio.to_thread(read_answer, answer, response.content, path)
        except ValidationError as error:
            raise EnvServerError(
                f"{url} did not answer with a {answer.__name__}: {error.errors()[0]['msg']}; is this an env server?"
            ) from error

    async def close_episode(self, base_url: str, episode_id: str) -> None:
        """Releases the replica; if this fails, the server's idle timeout does."""
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
            raise EnvServerError(f"{base_url}/health did not answer like an env server: {error}") from error

    async def fresh_observation(self, base_url: str, episode_id: str) -> Observation:
        found = await self._fetch(base_url, f"/v1/episodes/{episode_id}/observation?fresh=true")
        if found is None:
            raise ReplicaError(f"{base_url} has no screen of episode {episode_id}: it was closed, or its desktop died")
        return await read_observation(ObservationMessage.model_validate(found["observation"]))

    async def _describe(self, base_url: str) -> dict[str, Any] | None:
        return await self._fetch(base_url, "/v1/server")

    async def _own_episodes(self, base_url: str) -> list[str]:
        listed = await self._fetch(base_url, "/v1/episodes") or {}
        return [one["episode_id"] for one in listed.get("episodes", ()) if one.get("client_id") == self.client_id]

    async def _fetch(self, base_url: str, path: str) -> dict[str, Any] | None:
        """None if the server has no such page."""
        try:
            response = await self._http.get(f"{base_url}{path}")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(unreachable(base_url)) from error
        except httpx.HTTPError as error:
            raise EnvServerError(f"{base_url}{path} did not answer: {error or type(error).__name__}") from error
        return json_object(response.content) if response.status_code == httpx.codes.OK else None


class HttpDesktop:
    """One episode's desktop. Single use: reset once, then act, score, close."""

    def __init__(self, client: EnvClient, base_url: str) -> None:
        self._client = client
        self._base_url = base_url
        self._episode_id: str | None = None
        self._num_steps = 0
        self._can_resend = False

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        """Waits for a free replica within `capacity_s`, trying the servers in rotation.

        Raises:
            NoCapacityError, EnvServerError: none became free, or no server answered, within the limit.
            SetupError, ReplicaError: the task could not be set up, or its replica died.
        """
        assert self._episode_id is None, "a desktop is reset once"
        request = ResetRequest(
            task_config=dict(task.config),
            env_config=self._client.env_config,
            client_id=self._client.client_id,
            request_id=uuid.uuid4().hex,
            record_id=record_id[:MAX_RECORD_ID],
        ).model_dump(mode="json", exclude_none=True)
        answer = await self._reset_within_limit(request)
        self._episode_id, self._can_resend = answer.episode_id, answer.can_resend
        info = DesktopInfo(
            replica_id=answer.replica_id,
            provider=answer.provider,
            image_digest=answer.image_digest,
            grader_version=answer.grader_version,
        )
        return await read_observation(answer), info

    async def _reset_within_limit(self, request: dict[str, Any]) -> ResetAnswer:
        deadline = time.monotonic() + self._client.timeouts.capacity_s
        for attempt in itertools.count():
            try:
                return await self._reset_or_give_back(request)
            except (BusyError, UnreachableError) as error:
                asked_s = error.retry_after_s if isinstance(error, BusyError) else None
                wait_s = _backoff_s(attempt) if asked_s is None else asked_s * random.uniform(0.75, 1.25)
                if time.monotonic() + wait_s > deadline:
                    raise
                self._base_url = self._client.another_url()
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    async def _reset_or_give_back(self, request: dict[str, Any]) -> ResetAnswer:
        """Sends one /reset. If its caller is cancelled meanwhile, the replica that it may still get is released."""
        base_url = self._base_url
        pending = asyncio.ensure_future(self._reset_surely(base_url, request))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            self._client.close_when_done(base_url, pending)
            raise

    async def _reset_surely(self, base_url: str, request: dict[str, Any]) -> ResetAnswer:
        try:
            return await self._client.send(base_url, "/reset", request, ResetAnswer, can_resend=False)
        except ReplicaError as error:
            # Only a lost answer has this cause; a server without reset ids would open a second episode.
            if not isinstance(error.__cause__, LostAnswerError) or not await self._client.can_resend(base_url):
                raise
        return await self._client.send(base_url, "/reset", request, ResetAnswer, can_resend=True)

    async def act(self, command: str, *, pause_s: float, note: str = "") -> Observation:
        body = {"episode_id": self._live_id(), "action": command, "pause": pause_s, "step": self._num_steps + 1}
        if note:
            body["note"] = note[:MAX_NOTE].encode("utf-8", "replace").decode()
        if self._client.settle != "fixed":
            body["settle"] = self._client.settle
        answer = await self._client.send(self._base_url, "/step", body, StepAnswer, can_resend=self._can_resend)
        self._num_steps += 1
        observation = await read_observation(answer)
        return replace(observation, num_person_inputs=answer.num_person_inputs)

    async def score(self) -> float:
        body = {"episode_id": self._live_id()}
        answer = await self._client.send(self._base_url, "/evaluate", body, EvaluateAnswer, can_resend=self._can_resend)
        if not 0.0 <= answer.reward <= 1.0:
            raise EvaluatorError(f"the grader at {self._base_url} answered {answer.reward}, outside 0..1")
        return answer.reward

    @property
    def episode_id(self) -> str:
        return self._live_id()

    @property
    def base_url(self) -> str:
        return self._base_url

    @property
    def page_url(self) -> str:
        """The server's page of this episode, for a person."""
        return f"{self._base_url}/status#episode={self._live_id()}"

    async def look(self) -> Observation:
        """The screen as it is now. Only our server has it."""
        return await self._client.fresh_observation(self._base_url, self._live_id())

    async def next_input(self, after: int, *, wait_s: float) -> NextInputAnswer:
        """The person's input after this one, which makes the episode a demonstration. Raises EnvServerError if the
        server does not allow it."""
        path, body = f"/v1/episodes/{self._live_id()}/person/next", {"after": after, "wait": wait_s}
        return await self._client.send(self._base_url, path, body, NextInputAnswer, can_resend=True)

    async def close(self) -> None:
        episode_id, self._episode_id = self._episode_id, None
        if episode_id is not None:
            # Shielded, so that a cancelled episode still releases its replica.
            await asyncio.shield(self._client.close_episode(self._base_url, episode_id))

    def _live_id(self) -> str:
        assert self._episode_id is not None, "call reset first"
        return self._episode_id


def _backoff_s(attempt: int) -> float:
    """Jitter keeps the episodes of a group from retrying simultaneously."""
    return min(5.0, 0.25 * 2 ** min(attempt, 5)) * random.uniform(0.75, 1.25)
