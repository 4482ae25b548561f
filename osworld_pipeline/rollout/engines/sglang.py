"""Samples on sglang servers: an episode stays on one server, a failed server is excluded for a while, and only
responses of the run's own weights are returned.

Any number of engines, in any number of processes, may share a server. A server is admitted before it is sampled from
(`sglang_admission`). If the engine compares newcomers (`sglang_newcomers`), a server that joins during a run is
compared first.
"""

import asyncio
import functools
import itertools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines import sglang_locks
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown, within_budget
from osworld_pipeline.rollout.engines.sglang_admission import Admission, NotLoadedError
from osworld_pipeline.rollout.engines.sglang_broadcast import Broadcaster
from osworld_pipeline.rollout.engines.sglang_loading import FromFolder, LoadWeights
from osworld_pipeline.rollout.engines.sglang_messages import (
    UnknownWeightsError,
    generate_body,
    read_answer,
    with_adapter,
)
from osworld_pipeline.rollout.engines.sglang_newcomers import Compare, Newcomers, Peer, Warn
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.rollout.engines.sglang_upload import Upload
from osworld_pipeline.rollout.engines.sglang_weights import Label, TrainedWeights, Weights, read_weights

Result = TypeVar("Result")
LAG_LIMIT_S = 30.0
"""How long a response of the run's next weights waits until this engine receives those weights, too."""
LAG_POLL_S = 0.05


class SglangEngine:
    name = "sglang"
    uses_chat_api = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        renderer: Renderer,
        section: EngineSection,
        vocab_size: int,
        owner: str = "",
        policy_version: int = 0,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Use it from one event loop. Until `load_weights` it samples the weights that the servers were started with,
        as `policy_version`.

        `vocab_size`: rows of the model's embedding, from which the banned ids follow. `owner`: the name of the run;
        engines of one run change weights together. Empty: the engine is its own run.
        """
        if not urls:
            raise EngineError(
                "no sglang server configured: set engine.urls, or start one on a CPU with "
                f"`{shell_line(PIPELINE, 'sglang-cpu', 'CHECKPOINT')}`"
            )
        self._renderer = renderer
        self._section = section
        self._client = JsonClient(token=token, transport=transport)
        self._servers = [self._server(url.strip().rstrip("/")) for url in urls]
        self._banned_ids = frozenset(renderer.banned_ids(vocab_size))
        self._admission = Admission(
            renderer=renderer,
            banned_ids=tuple(sorted(self._banned_ids)),
            owner=digest_bytes((owner or uuid.uuid4().hex).encode())[:8],
            request_timeout_s=section.request_timeout_s,
            load=self._open_loader(),
        )
        self._weights = Weights(digest=None, policy_version=policy_version)
        self._incoming: Weights | None = None
        self._versions: dict[str, int] = {}
        """The policy version of each digest of whole weights."""
        self._loading = asyncio.Lock()
        self._of_episode: dict[str, SglangServer] = {}
        self._newcomers: Newcomers | None = None
        """None if every server that joins is admitted."""
        self._renewals: asyncio.Task[None] | None = None
        self._is_expanded = False
        """Whether routers were replaced by their servers."""
        self._is_closed = False

    @property
    def policy_version(self) -> int:
        return self._weights.policy_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._generate(request, None)

    def by_server(self) -> dict[str, Callable[[GenerateRequest], Awaitable[GenerateResult]]]:
        """`generate` of each server that holds the current weights, by its address; for a check that all of them must
        pass."""
        return {
            shown(server.url): functools.partial(self._generate, server=server)
            for server in self._servers
            if self._holds_weights(server)
        }

    async def compare_newcomers(self, compare: Compare, *, passed: Collection[str], warn: Warn) -> None:
        """After this call a server is sampled from only after a comparison, except those in `passed`, which uses the
        names of `by_server`. `warn`: receives a message if a server is refused or cannot be compared."""
        self._newcomers = Newcomers(
            compare, run=self._admission.owner, peer_of=self._peer, reference_of=self._reference, warn=warn
        )
        for server in self._servers:
            if shown(server.url) in passed and self._holds_weights(server):
                with suppress(EngineError):
                    await self._newcomers.has_passed(server)

    async def _generate(self, request: GenerateRequest, server: SglangServer | None) -> GenerateResult:
        """`server`: the server to use; None for any healthy one."""
        body = await self._body(request)
        return await self._within_budget(functools.partial(self._attempt, request, body, server))

    async def _body(self, request: GenerateRequest, **extra: Any) -> bytes:
        banned_ids = self._admission.banned_ids
        return await asyncio.to_thread(generate_body, request, self._renderer, banned_ids=banned_ids, **extra)

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Loads a checkpoint folder, in the way that `engine.weights` selects, into each server that does not hold its
        weights; an adapter checkpoint is loaded as an adapter over its base. A server that fails is excluded until it
        holds them; the engine's weights change if at least one server loaded them.

        Raises:
            EngineError: no server loaded them within the budget, or one of them cannot be sampled from, for example
                because it keeps stale image features.
        """
        path = await asyncio.to_thread(path.resolve)
        async with self._loading:
            await self._load(await asyncio.to_thread(read_weights, path, policy_version=policy_version))

    async def load_trained(self, trained: TrainedWeights, *, policy_version: int) -> None:
        """Does the same as `load_weights`, for weights that a trainer sends. Without a stream it waits until another
        program of the run has sent them to a server.

        Raises:
            EngineError: no server received them within the budget.
        """
        async with self._loading:
            await self._load(Weights(digest=trained.name, policy_version=policy_version, trained=trained))

    async def _load(self, weights: Weights) -> None:
        # Set before loading: responses in progress are the first to name the new weights.
        if weights.digest is not None and weights.adapter is None:
            self._versions[weights.digest] = weights.policy_version
        self._incoming = weights
        try:
            await self._within_budget(lambda _: self._load_everywhere(weights))
            self._weights = weights
        finally:
            self._incoming = None

    async def forget(self, episode_id: str) -> None:
        self._of_episode.pop(episode_id, None)

    async def health(self) -> None:
        """Waits at most `health_timeout_s` for all servers: each must answer, serve the same model as the others, and
        return the log-probabilities that training needs. A router is replaced by the servers behind it, because it does
        not forward weights."""
        limit_s = self._section.health_timeout_s
        timeout_s = min(self._section.request_timeout_s, limit_s)
        await within_budget(self._inspect_all, timeout_s=timeout_s, budget_s=limit_s)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        if self._newcomers is not None:
            await self._newcomers.close()
        await self._admission.load.close()
        own = [server for server in self._servers if server.held and server.owner == self._admission.owner]
        await asyncio.gather(*(sglang_locks.release_lease(server, server.owner) for server in own))
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
            try:
                await self._admit(server, timeout_s)
            except TransientError as error:
                server.failed(error)
                raise
            _, result = await self._ask(request, body, server, timeout_s)
        finally:
            server.num_running -= 1
        server.answered()
        return result

    async def _ask(
        self, request: GenerateRequest, body: bytes, server: SglangServer, timeout_s: float
    ) -> tuple[dict[str, Any], GenerateResult]:
        """The raw and the parsed answer of a server that holds the weights."""
        try:
            async with server.gate.passing():
                weights = self._weights_of(server)
                if weights.adapter is not None:
                    body = with_adapter(body, weights.adapter.name)
                answer = await server.generate(body, timeout_s=timeout_s)
            if "weight_versions" not in (answer.get("meta_info") or {}) and server.held != weights.name:
                raise TransientError(f"{shown(server.url)} does not report which weights sampled which token")
            return answer, await self._read(answer, request, weights)
        except UnknownWeightsError:
            server.lost()
            raise
        except TransientError as error:
            server.failed(error)
            raise
        except EngineError as error:
            if "LoRA adapter" not in str(error):
                raise
            # The server was restarted, or another program unloaded the adapter.
            server.lost()
            raise TransientError(str(error)) from error

    async def _read(self, answer: dict[str, Any], request: GenerateRequest, weights: Weights) -> GenerateResult:
        """Parses an answer; one of the run's next weights waits until this engine receives them."""
        deadline = time.monotonic() + LAG_LIMIT_S
        last = Label.parse(str((answer.get("meta_info") or {}).get("weight_version")))
        while weights.adapter is None and last.owner == self._admission.owner and last.weights not in self._versions:
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(LAG_POLL_S)
        versions = self._versions
        if weights.adapter is not None and weights.digest is not None:
            versions = {weights.digest: weights.policy_version}
        return await asyncio.to_thread(
            read_answer, answer, request, self._renderer, versions=versions, banned_ids=self._banned_ids
        )

    def _choose(self, episode_id: str) -> SglangServer:
        """The episode's own server while it is healthy, because it caches the episode; else the one with the fewest
        requests."""
        now = time.monotonic()
        well = [
            server
            for server in self._servers
            if server.out_until <= now
            and (self._is_admitted(server) or not (server.lock.locked() or self._is_waiting(server)))
        ]
        kept = self._of_episode.get(episode_id)
        if kept is not None and kept in well:
            return kept
        # If all are excluded, try the one that is due first.
        servers = well or [min(self._servers, key=lambda one: max(one.out_until, one.standing.held_back_until))]
        least = min(server.num_running for server in servers)
        server = random.choice([server for server in servers if server.num_running == least])
        if episode_id:
            self._of_episode[episode_id] = server
        return server

    async def _admit(self, server: SglangServer, timeout_s: float) -> None:
        """Returns at once if the server is known to hold the current weights, and has passed if newcomers are compared.

        Raises:
            TransientError: it cannot be used now, or is refused while others are available.
            EngineError: it is the only server and is refused.
        """
        if self._is_admitted(server):
            return
        try:
            await self._make_hold(server, timeout_s)
            if self._newcomers is not None:
                has_others = any(self._is_admitted(one) and one is not server for one in self._servers)
                await self._newcomers.admit(server, has_others=has_others, timeout_s=timeout_s)
        except TransientError:
            raise
        except EngineError as error:
            if len(self._servers) == 1:
                raise
            raise TransientError(str(error)) from error

    async def _make_hold(self, server: SglangServer, timeout_s: float) -> None:
        """Raises TransientError or EngineError if the server cannot be made to hold the current weights."""
        async with server.lock:
            if self._holds_weights(server):
                return
            await self._adopt(server, timeout_s)
            weights = self._incoming or self._weights
            await self._admission.hold(server, weights, is_explicit=False, timeout_s=timeout_s)
        self._start_renewals()

    def _server(self, url: str) -> SglangServer:
        mode = "abort" if self._section.running_responses == "abort" else "retract"
        return SglangServer(url=url, client=self._client, pause_mode=mode)

    def _open_loader(self) -> LoadWeights:
        section = self._section
        if section.weights == "folder":
            return FromFolder()
        if section.weights == "upload":
            return Upload(self._client, port=section.receiver_port)
        return Broadcaster(
            address=section.weights_address,
            num_expected=lambda: len(self._servers) if section.update_servers == "together" else 1,
        )

    async def _adopt(self, server: SglangServer, timeout_s: float) -> None:
        """An engine without weights adopts those of the first server that it inspects."""
        if self._weights.digest is not None or self._incoming is not None:
            return
        info = await self._admission.inspect(server, timeout_s=timeout_s)
        digest = Label.parse(str(info["weight_version"])).weights
        version = self._weights.policy_version
        self._weights = Weights(digest=digest, policy_version=version)
        self._versions[digest] = version

    async def _inspect_all(self, timeout_s: float) -> None:
        if not self._is_expanded:
            behind = [await server.worker_urls(timeout_s=timeout_s) for server in self._servers]
            self._servers = [
                fresh
                for server, urls in zip(self._servers, behind, strict=True)
                for fresh in ([self._server(url) for url in urls] or [server])
            ]
            self._is_expanded = True

        async def inspect(server: SglangServer) -> dict[str, Any]:
            async with server.lock:
                return await self._admission.inspect(server, timeout_s=timeout_s)

        infos = await asyncio.gather(*(inspect(server) for server in self._servers))
        models = [(info.get("model_type"), info.get("architectures")) for info in infos]
        for server, model in zip(self._servers, models, strict=True):
            if model != models[0]:
                raise EngineError(
                    f"the sglang server at {shown(server.url)} serves another model ({model[0]}) than the one at "
                    f"{shown(self._servers[0].url)} ({models[0][0]}): start all of them on one checkpoint"
                )

    def _peer(self, server: SglangServer) -> Peer:
        """Calls the server with the weights that it holds now, one try per call."""
        weights, timeout_s = self._weights_of(server), self._section.request_timeout_s

        async def ask(request: GenerateRequest, watched_ids: Sequence[int]) -> tuple[dict[str, Any], GenerateResult]:
            watched = {"token_ids_logprob": list(watched_ids)} if watched_ids else {}
            body = await self._body(request, **watched)
            answer, result = await self._ask(request, body, server, timeout_s)
            versions = {result.policy_version, *result.policy_versions}
            if server.held != weights.name or versions != {weights.policy_version}:
                raise TransientError(f"the weights of {shown(server.url)} changed in the meantime")
            return answer, result

        return Peer(name=f"the sglang server at {shown(server.url)}", ask=ask)

    async def _reference(self, server: SglangServer) -> Peer | Path | None:
        """The reference for a server that joins: an admitted server with the same weights, else a checkpoint. A
        checkpoint takes long to load, so on a first try it is used only if there is no other server; otherwise None.
        Raises TransientError, StoreError: the trainer's weights cannot be saved now."""
        others = [
            one for one in self._servers if one is not server and self._is_admitted(one) and one.held == server.held
        ]
        if others:
            return self._peer(min(others, key=lambda one: one.num_running))
        may_load = len(self._servers) == 1 or server.standing.num_tries > 0
        if not may_load:
            return None
        weights = self._weights_of(server)
        if weights.trained is not None and weights.trained.save is not None:
            return await weights.trained.save()
        return weights.checkpoint

    def _is_waiting(self, server: SglangServer) -> bool:
        return self._newcomers is not None and self._newcomers.is_waiting(server)

    def _is_admitted(self, server: SglangServer) -> bool:
        return self._holds_weights(server) and (self._newcomers is None or server.standing.has_passed)

    def _holds_weights(self, server: SglangServer) -> bool:
        incoming = self._incoming.name if self._incoming else self._weights.name
        return server.held is not None and server.held in (self._weights.name, incoming)

    def _weights_of(self, server: SglangServer) -> Weights:
        if self._incoming is not None and server.held == self._incoming.name:
            return self._incoming
        return self._weights

    async def _load_everywhere(self, weights: Weights) -> None:
        """
        Raises:
            TransientError: no server loaded them, but one of them may on another try.
            EngineError: no server loaded them, or one of them cannot be sampled from (wrong settings, stale images).
        """
        num_together = len(self._servers) if self._section.update_servers == "together" else 1
        errors: list[BaseException] = []
        for start in range(0, len(self._servers), num_together):
            batch = self._servers[start : start + num_together]
            loads = (self._load_locked(server, weights) for server in batch)
            results = await asyncio.gather(*loads, return_exceptions=True)
            errors += [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, TransientError | NotLoadedError):
                raise error
        if len(errors) == len(self._servers):
            raise next((error for error in errors if isinstance(error, TransientError)), errors[0])
        self._start_renewals()

    async def _load_locked(self, server: SglangServer, weights: Weights) -> None:
        async with server.lock:
            if server.held == weights.name:
                return
            timeout_s = self._section.request_timeout_s
            waits = self._section.running_responses == "wait"
            try:
                async with server.gate.closed(limit_s=timeout_s) if waits else nullcontext():
                    await self._admission.hold(server, weights, is_explicit=True, timeout_s=timeout_s)
            except EngineError as error:
                server.failed(error)
                raise
            server.answered()

    def _start_renewals(self) -> None:
        """Starts to renew leases once a server holds weights that a program loaded."""
        if self._renewals is None and not self._is_closed and any(server.owner for server in self._servers):
            self._renewals = asyncio.create_task(self._keep_leases())

    async def _keep_leases(self) -> None:
        for turn in itertools.count(1):
            await asyncio.sleep(random.uniform(0.75, 1.25) * sglang_locks.RENEWAL_S)
            for server in self._servers:
                with suppress(EngineError):
                    await self._keep_lease(server, turn)

    async def _keep_lease(self, server: SglangServer, turn: int) -> None:
        """Renews the lease; takes over the weights of another run that has ended. Sends the trainer's weights again to
        a server that has lost them, because no other program can."""
        if self._weights.trained is not None and self._weights.source is not None and not self._is_admitted(server):
            await self._admit(server, self._section.request_timeout_s)
        if not self._holds_weights(server) or not server.owner:
            return
        if server.owner == self._admission.owner:
            await sglang_locks.renew_lease(server, server.owner, turn=turn)
            return
        async with server.lock:
            if self._holds_weights(server):
                timeout_s = self._section.request_timeout_s
                await self._admission.hold(server, self._weights_of(server), is_explicit=False, timeout_s=timeout_s)
