"""`protocols.Desktop` over HTTP: one episode's desktop at an env server."""

import asyncio
import itertools
import random
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import EvaluatorError, ReplicaError
from osworld_pipeline.protocols import DesktopInfo
from osworld_pipeline.rollout.env_answers import BusyError, LostAnswerError, UnreachableError, read_observation
from osworld_pipeline.rollout.env_fleet import EnvServer
from osworld_pipeline.wire import (
    MAX_NOTE,
    MAX_RECORD_ID,
    EvaluateAnswer,
    NextInputAnswer,
    ResetAnswer,
    ResetRequest,
    StepAnswer,
)

if TYPE_CHECKING:
    from osworld_pipeline.rollout.env_client import EnvClient

QUEUE_S = (1.5, 2.5)
"""How long a reset waits at one of several servers, before another one is asked that may have a free desktop. Random,
because the episodes of a lost host begin to wait together."""


class HttpDesktop:
    """One episode's desktop. Single use: reset once, then act, score, close."""

    def __init__(self, client: "EnvClient") -> None:
        self._client = client
        self._base_url = ""
        self._episode_id: str | None = None
        self._server: EnvServer | None = None
        """Where it counts as in use."""
        self._num_steps = 0
        self._can_resend = False

    async def reset(self, task: Task, *, record_id: str = "") -> tuple[Observation, DesktopInfo]:
        """Waits for a free replica on the server with the most free ones, at most `capacity_s` after the call or after
        the last release of a replica by this client.

        Raises:
            NoCapacityError, EnvServerError: none became free, or no server answered, within the limit; or every server
                was refused.
            ReplicaError: the task could not be set up, or its replica died.
            TaskError: the server refused the task.
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
        fleet, started, limit_s = self._client.fleet, time.monotonic(), self._client.timeouts.capacity_s
        fleet.watch()
        for attempt in itertools.count():
            try:
                return await self._reset_at(fleet.choose(), request)
            except (BusyError, UnreachableError) as error:
                if fleet.has_free:
                    continue
                asked_s = error.retry_after_s if isinstance(error, BusyError) else None
                wait_s = backoff_s(attempt) if asked_s is None else asked_s * random.uniform(0.75, 1.25)
                if time.monotonic() + wait_s > max(started, fleet.last_release) + limit_s:
                    raise
                await fleet.until_free(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    async def _reset_at(self, server: EnvServer, request: dict[str, Any]) -> ResetAnswer:
        """Raises BusyError, UnreachableError: the fleet has been informed."""
        fleet = self._client.fleet
        self._base_url = server.url
        body = {**request, "queue_s": random.uniform(*QUEUE_S)} if fleet.has_several else request
        server.num_waiting += 1
        try:
            answer = await self._reset_or_give_back(body)
        except BusyError:
            fleet.is_full(server)
            raise
        except UnreachableError as error:
            fleet.is_unreachable(server, error)
            raise
        finally:
            server.num_waiting -= 1
        self._server, server.num_in_use = server, server.num_in_use + 1
        return answer

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
        """Waits at most `wait_s` for the person's input after input number `after`. The first call makes the episode a
        demonstration, in which a person's inputs are queued. Raises EnvServerError if the server does not allow it."""
        path, body = f"/v1/episodes/{self._live_id()}/person/next", {"after": after, "wait": wait_s}
        return await self._client.send(self._base_url, path, body, NextInputAnswer, can_resend=True)

    async def close(self) -> None:
        episode_id, self._episode_id = self._episode_id, None
        if episode_id is None:
            return
        try:
            # Shielded, so that a cancelled episode still releases its replica.
            await asyncio.shield(self._client.close_episode(self._base_url, episode_id))
        finally:
            if self._server is not None:
                self._server.num_in_use -= 1

    def _live_id(self) -> str:
        assert self._episode_id is not None, "call reset first"
        return self._episode_id


def backoff_s(attempt: int) -> float:
    """Jitter keeps the episodes of a group from retrying simultaneously."""
    return min(5.0, 0.25 * 2 ** min(attempt, 5)) * random.uniform(0.75, 1.25)
