"""The env server's client: connections to one server or several, and the retries of calls.

With our server, resets have ids, steps have numbers and evaluations are cached. A call whose answer was lost (a broken
connection, a timeout, a gateway's error) is therefore retried for a while and still executed only once. For a server
that does not report this, a call is sent once, because a retry could act twice.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
from pydantic import ValidationError

from osworld_pipeline.domain.grounds import Grounds
from osworld_pipeline.domain.observation import Observation, Settle
from osworld_pipeline.domain.shown_commands import ENV_SERVER, shell_line
from osworld_pipeline.errors import EnvServerError, EvaluatorError, PipelineError, ReplicaError
from osworld_pipeline.rollout.env_addresses import split_addresses
from osworld_pipeline.rollout.env_answers import (
    BIG_ANSWER_BYTES,
    Answer,
    LostAnswerError,
    UnreachableError,
    error_of,
    json_object,
    read_answer,
    read_observation,
    unreachable,
)
from osworld_pipeline.rollout.env_fleet import EnvFleet, ServerReport, ServerState
from osworld_pipeline.rollout.http_desktop import HttpDesktop, backoff_s
from osworld_pipeline.wire import (
    EnvConfig,
    HealthAnswer,
    ObservationMessage,
    ResetAnswer,
)
from osworld_pipeline.wire.http_pools import PooledTransport
from osworld_pipeline.wire.protocol import UNREPORTED
from osworld_pipeline.wire.tracing import send_context

GATEWAY_ERRORS = (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT)
"""Returned by a proxy that lost the server's answer."""


@dataclass(frozen=True, kw_only=True)
class EnvTimeouts:
    connect_s: float = 5.0
    request_s: float = 120.0
    """Limit of one /reset, /step or /evaluate."""
    capacity_s: float = 300.0
    """How long /reset waits for a free replica, and for a server that is starting. The time starts again when an
    episode of the client ends, because the desktops are then busy, not lost."""
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
        may_mix_servers: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_urls`: a comma-separated string, or a sequence; an address may stand for several servers
        (`env_addresses`). `settle`: how steps pause; a server without this option makes the full pause.
        `may_mix_servers`: they may differ in desktop image and grader. `transport` replaces the network in tests."""
        addresses = split_addresses(base_urls)
        if not addresses:
            raise EnvServerError(
                f"no env server address given; start one with: {shell_line(ENV_SERVER, '--provider', 'local')}"
            )
        self.env_config = env_config or EnvConfig()
        self.timeouts = timeouts or EnvTimeouts()
        self.client_id = client_id
        self.settle: Settle = settle
        self.fleet = EnvFleet(addresses, self, may_mix=may_mix_servers)
        self._stragglers: set[asyncio.Future[None]] = set()
        self._unclosed: dict[str, set[str]] = {}
        """Episodes that a server may still have, by server."""
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.timeouts.request_s, connect=self.timeouts.connect_s),
            transport=transport or PooledTransport(),
            event_hooks={"request": [send_context]},
            # A desktop is local or has an explicit address; a proxy from the environment would be wrong.
            trust_env=False,
        )

    def desktop(self) -> HttpDesktop:
        """A desktop that is not reset yet; its reset chooses the server."""
        return HttpDesktop(self)

    async def connect(self) -> None:
        """Checks that at least one server answers and that all servers that answer may be used together. From then on
        it notices servers that join or leave.

        Raises:
            EnvServerError: no server answers, one has another protocol, or two differ in desktop image or grader; names
                them.
        """
        await self.fleet.open()

    async def health(self) -> tuple[HealthAnswer, ...]:
        """The health answer of every server.

        Raises:
            EnvServerError: a server is unreachable; names it.
        """
        return tuple([await self.health_of(server.url) for server in self.fleet.servers])

    async def close_left_over(self) -> int:
        """Releases the desktops of live episodes with this client's name, and returns their number. Call it after
        `connect` and before the first episode, if no other live process has the name. Servers that do not list their
        episodes, or cannot be reached, are skipped; there the episodes end after the idle timeout. Raises
        EnvServerError if a server was reached and did not answer."""
        num_closed = 0
        for server in self.fleet.servers:
            if server.state is ServerState.DOWN:
                continue
            for episode_id in await self._own_episodes(server.url):
                await self.close_episode(server.url, episode_id)
                num_closed += 1
        return num_closed

    async def close(self) -> None:
        """Waits (within the request's own limit) for replicas that are still being released."""
        if self._stragglers:
            await asyncio.wait(self._stragglers, timeout=self.timeouts.close_s)
        await self.fleet.close()
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
                if not can_resend or self._is_silent(base_url):
                    raise lost.meaning from lost
                give_up_at = min(give_up_at, time.monotonic() + self.timeouts.resend_s)
                wait_s = backoff_s(attempt)
                if time.monotonic() + wait_s >= give_up_at:
                    raise lost.meaning from lost
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    async def can_resend(self, base_url: str) -> bool:
        """Whether the server reports that a reset with an id may be sent again."""
        try:
            return (await self.health_of(base_url)).can_resend
        except EnvServerError:
            return False

    async def _send_once(
        self, base_url: str, path: str, body: Mapping[str, Any], answer: type[Answer], timeout_s: float
    ) -> Answer:
        url = f"{base_url}{path}"
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self.timeouts.connect_s))
        try:
            response = await self._unless_silent(base_url, path, self._http.post(url, json=dict(body), timeout=timeout))
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

    async def _unless_silent(
        self, base_url: str, path: str, call: Coroutine[Any, Any, httpx.Response]
    ) -> httpx.Response:
        """The response of a call. Raises LostAnswerError: the server answers nothing at all any more, long before the
        time limit of the call."""
        silence = self.fleet.silence_of(base_url)
        if silence is None:
            return await call
        calling, waiting = asyncio.ensure_future(call), asyncio.ensure_future(silence.wait())
        try:
            await asyncio.wait({calling, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                kind = {"/reset": UnreachableError, "/evaluate": EvaluatorError}.get(path, ReplicaError)
                raise LostAnswerError(kind(f"{base_url} does not answer any more: its machine or its network was lost"))
            response = calling.result()
        finally:
            calling.cancel()
            waiting.cancel()
            await asyncio.gather(calling, waiting, return_exceptions=True)
        self.fleet.has_answered(base_url)
        return response

    def _is_silent(self, base_url: str) -> bool:
        silence = self.fleet.silence_of(base_url)
        return silence is not None and silence.is_set()

    async def close_episode(self, base_url: str, episode_id: str) -> None:
        """Releases the replica. If the server cannot be reached, the request is sent again when it answers; if this
        client has ended by then, the server's idle timeout releases the replica."""
        try:
            await self._http.post(
                f"{base_url}/close", json={"episode_id": episode_id}, timeout=httpx.Timeout(self.timeouts.close_s)
            )
        except httpx.HTTPError:
            self._unclosed.setdefault(base_url, set()).add(episode_id)
            return
        except RuntimeError:  # the client was closed before the desktop
            return
        self.fleet.released(base_url)

    def _close_unclosed(self, base_url: str) -> None:
        for episode_id in self._unclosed.pop(base_url, ()):
            self._in_background(self.close_episode(base_url, episode_id))

    def close_when_done(self, base_url: str, pending: "asyncio.Future[ResetAnswer]") -> None:
        async def give_back() -> None:
            try:
                answer = await pending
            except PipelineError:
                return
            await self.close_episode(base_url, answer.episode_id)

        self._in_background(give_back())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        straggler = asyncio.ensure_future(work)
        self._stragglers.add(straggler)
        straggler.add_done_callback(self._stragglers.discard)

    async def health_of(self, base_url: str, *, connect_s: float | None = None) -> HealthAnswer:
        timeout = httpx.Timeout(self.timeouts.request_s, connect=connect_s or self.timeouts.connect_s)
        try:
            response = await self._http.get(f"{base_url}/health", timeout=timeout)
            response.raise_for_status()
            answer = HealthAnswer.model_validate_json(response.content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(unreachable(base_url)) from error
        except (httpx.HTTPError, ValidationError) as error:
            raise EnvServerError(f"{base_url}/health did not answer like an env server: {error}") from error
        self._close_unclosed(base_url)
        return answer

    async def fresh_observation(self, base_url: str, episode_id: str) -> Observation:
        found = await self._fetch(base_url, f"/v1/episodes/{episode_id}/observation?fresh=true")
        if found is None:
            raise ReplicaError(f"{base_url} has no screen of episode {episode_id}: it was closed, or its desktop died")
        return await read_observation(ObservationMessage.model_validate(found["observation"]))

    async def report_of(self, base_url: str) -> ServerReport | None:
        info = await self._fetch(base_url, "/v1/server")
        if info is None:
            return None
        protocol = info.get("protocol", UNREPORTED)
        if type(protocol) is not int:
            raise EnvServerError(f"{base_url}/v1/server reports the protocol {protocol!r}, which is not a number")
        return ServerReport(
            version=str(info.get("version", "unknown")),
            protocol=protocol,
            grounds=Grounds(
                image_digest=str(info.get("image_digest", "")), grader_version=str(info.get("grader_version", ""))
            ),
        )

    async def _own_episodes(self, base_url: str) -> list[str]:
        try:
            listed = await self._fetch(base_url, "/v1/episodes") or {}
        except UnreachableError:
            return []
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
