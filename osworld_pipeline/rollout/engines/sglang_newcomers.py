"""Compares servers that join an engine during a run, before they are sampled from: servers that were unreachable when
the engine opened, were restarted, or lost their admission.

A server process that has passed has a mark of its run, a session that ends with the process. After a broken connection
it is admitted again without a comparison, and the engines of one run compare a server once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines import sglang_locks
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_messages import read_scores
from osworld_pipeline.rollout.engines.sglang_server import SglangServer

PEER_LIMIT_S = 120.0
"""Limit of a comparison with another server."""
FOLDER_LIMIT_S = 900.0
"""Limit of a comparison with a checkpoint, which must be loaded first."""
FIRST_RETRY_S, MAX_RETRY_S = 5.0, 60.0
"""Pauses after a comparison that failed to run; each is twice the previous one."""
FIRST_REFUSAL_S, MAX_REFUSAL_S = 60.0, 1800.0
"""Pauses after a refusal, likewise."""
PASSED_LIMIT_S = 24 * 3600.0
"""A mark expires after this time, so that runs leave no permanent sessions."""

Ask = Callable[[GenerateRequest, Sequence[int]], Awaitable[tuple[dict[str, Any], GenerateResult]]]
"""Returns a server's raw and parsed answer, with the log-probabilities of the given ids."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server as seen by a comparison. Calls raise TransientError once its weights have changed."""

    name: str
    ask: Ask

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return (await self.ask(request, ()))[1]

    async def score(self, request: GenerateRequest, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of given tokens after a prompt, each under the distribution that would have sampled it,
        with the request's temperature, images and banned ids. All but the last are sent as part of the prompt."""
        logprobs: list[float] = []
        for index, token_id in enumerate(token_ids):
            sampling = replace(request.sampling, max_new_tokens=1)
            prompt = (*request.token_ids, *token_ids[:index])
            answer, _ = await self.ask(replace(request, token_ids=prompt, sampling=sampling), (token_id,))
            logprobs += read_scores(answer)
        return tuple(logprobs)


Compare = Callable[[Peer, Peer | Path], Awaitable[None]]
"""Compares a server that joins with one that has passed, or with the checkpoint folder that it is to sample. Raises
TransientError with the reason if it cannot run now, EngineError if the server is refused."""
Warn = Callable[[str], None]


class Newcomers:
    """Controls the admission of servers to one engine. Use it from the engine's event loop."""

    def __init__(
        self,
        compare: Compare,
        *,
        run: str,
        peer_of: Callable[[SglangServer], Peer],
        reference_of: Callable[[SglangServer], Awaitable[Peer | Path | None]],
        warn: Warn,
    ) -> None:
        """`run`: scope of marks and locks. `reference_of`: the reference for a server; None if there is none at
        present."""
        self._compare = compare
        self._passed, self._refused, self._lock = (
            f"osworld-parity-{what}-{run}" for what in ("passed", "refused", "lock")
        )
        self._peer_of = peer_of
        self._reference_of = reference_of
        self._warn = warn
        self._joining: dict[SglangServer, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        """One comparison at a time, because the next server can be compared with this one."""

    async def has_passed(self, server: SglangServer) -> None:
        """Admits a server that was probed otherwise."""
        server.standing.has_passed = True
        await sglang_locks.leave_mark(server, self._passed, limit_s=PASSED_LIMIT_S)

    def is_waiting(self, server: SglangServer) -> bool:
        """Whether the server is being compared, or was refused or could not be compared a short time ago."""
        return server in self._joining or server.standing.held_back_until > time.monotonic()

    async def admit(self, server: SglangServer, *, has_others: bool, timeout_s: float) -> None:
        """Returns once the server has passed. `has_others`: other servers are available, so do not wait.

        Raises:
            TransientError: the comparison is running, or failed to run.
            EngineError: it is refused.
        """
        standing = server.standing
        if not standing.has_passed and standing.held_back_until <= time.monotonic():
            task = self._joining.get(server)
            if task is None:
                task = self._joining[server] = asyncio.create_task(self._join(server))
            if not has_others:
                await asyncio.wait({task}, timeout=timeout_s)
        if standing.has_passed:
            return
        if standing.is_refused and server not in self._joining:
            raise EngineError(standing.reason)
        reason = f"the sglang server at {shown(server.url)} has joined and must be compared before it is sampled from"
        left_s = max(1.0, standing.held_back_until - time.monotonic())
        raise TransientError(
            standing.reason or reason, retry_after_s=0.0 if has_others else min(FIRST_RETRY_S, left_s), is_busy=True
        )

    async def close(self) -> None:
        tasks = list(self._joining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, server: SglangServer) -> None:
        """Never raises, and always updates the standing, so that a server is not compared again immediately."""
        try:
            async with self._turn:
                reference = await self._reference_of(server)
                limit_s = FOLDER_LIMIT_S if isinstance(reference, Path) else PEER_LIMIT_S
                await self._compare_within(server, reference, limit_s)
            if server.held is None:
                raise TransientError("its connection or its weights were lost in the meantime")
        except TransientError as error:
            self._hold_back(server, str(error), is_refused=False)
        except EngineError as error:
            self._hold_back(server, str(error), is_refused=True)
        except Exception as error:  # noqa: BLE001 - a defect of the probe must not admit a server
            self._hold_back(server, f"{type(error).__name__}: {error}", is_refused=False)
        else:
            server.standing.admit()
        finally:
            self._joining.pop(server, None)

    async def _compare_within(self, server: SglangServer, reference: Peer | Path | None, limit_s: float) -> None:
        try:
            async with (
                asyncio.timeout(limit_s),
                sglang_locks.exclusive(server, self._lock, expires_s=limit_s, limit_s=limit_s),
            ):
                if await sglang_locks.is_marked(server, self._passed):
                    return
                if await sglang_locks.is_marked(server, self._refused):
                    raise EngineError(
                        f"the sglang server at {shown(server.url)} was refused by another engine of this run"
                    )
                if reference is None:
                    raise TransientError("no server that has passed the parity probe is available for the comparison")
                await self._compare_marked(server, reference)
        except TimeoutError as error:
            raise TransientError(f"the comparison did not end within {limit_s:g} s") from error

    async def _compare_marked(self, server: SglangServer, reference: Peer | Path) -> None:
        try:
            await self._compare(self._peer_of(server), reference)
        except TransientError:
            raise
        except EngineError:
            # The mark expires before this engine compares again.
            limit_s = 0.9 * _pause_s(FIRST_REFUSAL_S, MAX_REFUSAL_S, server.standing.num_tries)
            await sglang_locks.leave_mark(server, self._refused, limit_s=limit_s)
            raise
        await sglang_locks.leave_mark(server, self._passed, limit_s=PASSED_LIMIT_S)

    def _hold_back(self, server: SglangServer, reason: str, *, is_refused: bool) -> None:
        standing = server.standing
        limits = (FIRST_REFUSAL_S, MAX_REFUSAL_S) if is_refused else (FIRST_RETRY_S, MAX_RETRY_S)
        pause_s = _pause_s(*limits, standing.num_tries)
        where = f"the sglang server at {shown(server.url)}"
        message = reason if is_refused else f"{where} has joined and could not be compared: {reason}"
        message = f"{message}; it is not sampled from, and is compared again after {pause_s:g} s"
        standing.hold_back(message, pause_s, is_refused=is_refused)
        if is_refused or standing.num_tries > 1:
            self._warn(message)


def _pause_s(first_s: float, most_s: float, num_tries: int) -> float:
    return min(most_s, first_s * 2 ** min(num_tries, 10))
