"""Samples on sglang servers: an episode stays with one of them, a server that fails is left out for a while, and
nothing is sampled from weights that were not loaded from here.

Each server is admitted before it is asked for anything: it answers, sees images, gives the log-probabilities of the raw
logits, and holds the weights of the moment; one that was started anew is given them first.
"""

import asyncio
import functools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown, within_budget
from osworld_pipeline.rollout.engines.sglang_checks import check_logprob_scale, vision_cache_problem
from osworld_pipeline.rollout.engines.sglang_messages import (
    UnknownWeightsError,
    UnusableTokenError,
    generate_body,
    read_answer,
)
from osworld_pipeline.rollout.engines.sglang_server import SglangServer, Weights

Result = TypeVar("Result")
MAX_SAMPLES = 8
"""Of one turn, where samples hold placeholders: a policy that says nothing else is broken."""


class SglangEngine:
    name = "sglang"
    takes_turns = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        renderer: Renderer,
        section: EngineSection,
        policy_version: int = 0,
        token: str | None = None,
        vision_may_change: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Use it from one event loop. Until `load_weights` it samples what the servers were started with, as
        `policy_version`.

        `vision_may_change`: False only where every set of weights that these servers are given has the same vision
        tower; else a server must run with its vision cache off, which the first `load_weights` checks.
        """
        if not urls:
            raise EngineError("no sglang server named: set engine.urls, or start one with scripts/sglang-cpu")
        self._renderer = renderer
        self._section = section
        self._vision_may_change = vision_may_change
        self._client = JsonClient(token=token, transport=transport)
        self._servers = [SglangServer(url=url.strip().rstrip("/"), client=self._client) for url in urls]
        self._weights = Weights(label=None, policy_version=policy_version)
        self._incoming: Weights | None = None
        self._versions: dict[str, int] = {}
        """The policy version behind each label."""
        self._loading = asyncio.Lock()
        self._of_episode: dict[str, SglangServer] = {}
        self._is_expanded = False
        """Whether routers were replaced by their servers."""
        self._is_closed = False

    @property
    def policy_version(self) -> int:
        return self._weights.policy_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._generate(request, None)

    def by_server(self) -> dict[str, Callable[[GenerateRequest], Awaitable[GenerateResult]]]:
        """`generate` of each server that holds the weights of the moment, by its address: for a check that every one of
        them must pass."""
        return {
            shown(server.url): functools.partial(self._generate, server=server)
            for server in self._servers
            if self._is_admitted(server)
        }

    async def _generate(self, request: GenerateRequest, server: SglangServer | None) -> GenerateResult:
        """`server`: the one to ask; None for any that is well."""
        seed = request.sampling.seed
        for sample in range(1, MAX_SAMPLES + 1):
            body = await asyncio.to_thread(generate_body, request, self._renderer, seed=seed)
            try:
                return await self._within_budget(functools.partial(self._attempt, request, body, server))
            except UnusableTokenError as error:
                if sample == MAX_SAMPLES:
                    raise EngineError(
                        f"{error}, in each of {sample} samples: the policy has hardly been trained and says what no "
                        "text is; give it more updates of SFT, or sample it with engine.kind=transformers, which rules "
                        "such ids out"
                    ) from error
                seed = random.Random(seed).getrandbits(31)
        raise AssertionError("unreachable: the last sample is returned or raises")

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Weights of a checkpoint folder that the servers see under the same path, into each of them. A server that
        fails it is left out until it holds them; the engine's weights change where at least one took them.

        Raises:
            EngineError: no server took them within the budget, or one of them keeps stale images.
        """
        path = await asyncio.to_thread(path.resolve)
        async with self._loading:
            label = f"{policy_version}-{uuid.uuid4().hex[:8]}"
            weights = Weights(label=label, policy_version=policy_version, path=path)
            # Before they are loaded: responses that are half done will be the first to name them.
            self._versions[label] = policy_version
            self._incoming = weights
            try:
                await self._within_budget(lambda _: self._load_everywhere(weights))
                self._weights = weights
            finally:
                self._incoming = None

    async def forget(self, episode_id: str) -> None:
        self._of_episode.pop(episode_id, None)

    async def health(self) -> None:
        """Waits `health_timeout_s` for every server: it answers, serves one model, and gives the log-probabilities that
        training needs. A router is replaced by the servers behind it, since it passes no weights on."""
        limit_s = self._section.health_timeout_s
        timeout_s = min(self._section.request_timeout_s, limit_s)
        await within_budget(self._inspect_all, timeout_s=timeout_s, budget_s=limit_s)

    async def close(self) -> None:
        self._is_closed = True
        await self._client.close()

    async def _within_budget(self, attempt: Callable[[float], Awaitable[Result]]) -> Result:
        if self._is_closed:
            raise EngineError("the sglang engine is closed")
        section = self._section
        return await within_budget(attempt, timeout_s=section.request_timeout_s, budget_s=section.retry_budget_s)

    async def _attempt(
        self, request: GenerateRequest, body: bytes, asked: SglangServer | None, timeout_s: float
    ) -> GenerateResult:
        server = asked or self._choose(request.episode_id)
        server.num_running += 1
        try:
            await self._admit(server, timeout_s)
            label = server.label
            answer = await server.generate(body, timeout_s=timeout_s)
            if "weight_versions" not in (answer.get("meta_info") or {}) and server.label != label:
                raise TransientError(f"{shown(server.url)} does not say which weights sampled which token")
            result = await asyncio.to_thread(read_answer, answer, request, self._renderer, self._versions)
        except UnknownWeightsError:
            server.label = None
            raise
        except TransientError as error:
            server.failed(error)
            raise
        finally:
            server.num_running -= 1
        server.answered()
        return result

    def _choose(self, episode_id: str) -> SglangServer:
        """The episode's own server while it is well, for what it has computed of the episode; else the one with the
        fewest requests."""
        now = time.monotonic()
        well = [
            server
            for server in self._servers
            if server.out_until <= now and (self._is_admitted(server) or not server.lock.locked())
        ]
        kept = self._of_episode.get(episode_id)
        if kept is not None and kept in well:
            return kept
        # Where all are left out, the one that comes back first is worth a try.
        servers = well or [min(self._servers, key=lambda server: server.out_until)]
        least = min(server.num_running for server in servers)
        server = random.choice([server for server in servers if server.num_running == least])
        if episode_id:
            self._of_episode[episode_id] = server
        return server

    async def _admit(self, server: SglangServer, timeout_s: float) -> None:
        """Returns at once where the server is known to hold the weights of the moment.

        Raises:
            TransientError: it cannot be asked now, or not at all while others can.
            EngineError: it is the only one, and not to be sampled from.
        """
        if self._is_admitted(server):
            return
        async with server.lock:
            if self._is_admitted(server):
                return
            try:
                await self._see_to_weights(server, await self._inspect(server, timeout_s))
            except TransientError:
                raise
            except EngineError as error:
                if len(self._servers) == 1:
                    raise
                raise TransientError(str(error)) from error

    async def _see_to_weights(self, server: SglangServer, info: dict[str, Any]) -> None:
        label = str(info["weight_version"])
        weights = self._incoming or self._weights
        if weights.label is None:
            weights = self._weights = Weights(label=label, policy_version=weights.policy_version)
            self._versions[label] = weights.policy_version
        if label == weights.label:
            server.holds(label)
        elif weights.path is not None:
            await self._load(server, weights)
        else:
            raise EngineError(
                f"the sglang server at {shown(server.url)} holds other weights ({info['model_path']}, {label}) than "
                f"the rest ({weights.label}): start all of them on one checkpoint, or load weights first"
            )

    async def _inspect(self, server: SglangServer, timeout_s: float) -> dict[str, Any]:
        """Under the server's lock: what it says of its model, once it has been found fit."""
        info = await server.model_info(timeout_s=timeout_s)
        label = str(info["weight_version"])
        if label != server.last_label:
            # Not as it was left: a new process, perhaps with other settings.
            server.is_scale_checked = server.is_vision_checked = False
            server.last_label = label
        if not server.is_scale_checked:
            await check_logprob_scale(server, self._renderer, timeout_s=timeout_s)
            server.is_scale_checked = True
        return info

    async def _inspect_all(self, timeout_s: float) -> None:
        if not self._is_expanded:
            behind = [await server.worker_urls(timeout_s=timeout_s) for server in self._servers]
            self._servers = [
                fresh
                for server, urls in zip(self._servers, behind, strict=True)
                for fresh in ([SglangServer(url=url, client=self._client) for url in urls] or [server])
            ]
            self._is_expanded = True

        async def inspect(server: SglangServer) -> dict[str, Any]:
            async with server.lock:
                return await self._inspect(server, timeout_s)

        infos = await asyncio.gather(*(inspect(server) for server in self._servers))
        models = [(info.get("model_type"), info.get("architectures")) for info in infos]
        for server, model in zip(self._servers, models, strict=True):
            if model != models[0]:
                raise EngineError(
                    f"the sglang server at {shown(server.url)} serves another model ({model[0]}) than the one at "
                    f"{shown(self._servers[0].url)} ({models[0][0]})"
                )

    def _is_admitted(self, server: SglangServer) -> bool:
        incoming = self._incoming.label if self._incoming else self._weights.label
        return server.label is not None and server.label in (self._weights.label, incoming)

    async def _load_everywhere(self, weights: Weights) -> None:
        """
        Raises:
            TransientError: no server took them, and one of them may yet.
            EngineError: no server took them, or one of them keeps stale images.
        """
        results = await asyncio.gather(
            *(self._load_locked(server, weights) for server in self._servers), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, TransientError | _NotLoadedError):
                raise error
        if len(errors) == len(self._servers):
            raise next((error for error in errors if isinstance(error, TransientError)), errors[0])

    async def _load_locked(self, server: SglangServer, weights: Weights) -> None:
        async with server.lock:
            if server.label == weights.label:
                return
            try:
                await self._load(server, weights)
            except EngineError as error:
                server.failed(error)
                raise

    async def _load(self, server: SglangServer, weights: Weights) -> None:
        """Under the server's lock."""
        assert weights.path is not None
        assert weights.label is not None
        problem = None
        if self._vision_may_change and not server.is_vision_checked:
            timeout_s = self._section.request_timeout_s
            problem = await vision_cache_problem(server, self._renderer, weights.path, timeout_s=timeout_s)
        try:
            await server.load_weights(weights.path, weights.label)
        except TransientError:
            raise
        except EngineError as error:
            raise _NotLoadedError(str(error)) from error
        if problem is not None:
            raise EngineError(problem)
        server.is_vision_checked = self._vision_may_change
        server.holds(weights.label)


class _NotLoadedError(EngineError):
    """A server refused weights, for a reason of its own or of theirs."""
