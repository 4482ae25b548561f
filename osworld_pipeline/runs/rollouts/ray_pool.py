"""A pool of Ray actors on any node. Each has an open session and runs many calls concurrently; a lost actor is replaced
by the next call to its slot. `ray_job`, which runs the program, connects to Ray.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from osworld_pipeline.errors import EngineError, PipelineError
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S, LostActorError, answer_of
from osworld_pipeline.wire.tracing import flush, start_tracing

Result = TypeVar("Result")
OpenSession = Callable[[str], AbstractAsyncContextManager[Any]]
"""Called in the actor with a client id of its own; picklable. Opens the object whose methods are called."""
MAX_CONCURRENCY = 1000
"""Limit of concurrent calls to one actor; the caller limits the number of concurrent episodes."""


class PooledActor:
    """The class that runs inside a Ray actor."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._session: Any = None

    async def open(self, open_session: OpenSession, client_id: str) -> None:
        start_tracing("osworld-pipeline")
        self._session = await self._stack.enter_async_context(open_session(client_id))

    async def call(self, method: str, *arguments: Any) -> Any:
        assert self._session is not None, "an actor is opened before it is used"
        return await getattr(self._session, method)(*arguments)

    async def close(self) -> None:
        await self._stack.aclose()
        # Ray kills the actor without its exit handlers.
        await asyncio.to_thread(flush)


@dataclass(eq=False)
class Slot:
    """The place of one actor; a replacement takes the same slot."""

    index: int
    handle: Any = None
    num_running: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ActorPool:
    """The actors of one program. Its methods re-raise our own exceptions from a session unchanged."""

    def __init__(self, open_session: OpenSession, share: RayShare, *, purpose: str) -> None:
        self.open_session = open_session
        """For actors that start from now on."""
        self._share = share
        self._purpose = purpose
        self._slots = [Slot(index) for index in range(share.num_rollout_actors)]
        self.num_lost = 0
        """Actors that died or stopped responding, over the whole run."""

    async def open(self) -> None:
        """Starts all actors at once. Raises EngineError."""
        await _gather([self._actor(slot) for slot in self._slots])

    async def close(self) -> None:
        """Idempotent; actors that still respond release their desktops."""
        import ray

        for slot in self._slots:
            handle, slot.handle = slot.handle, None
            if handle is not None:
                with suppress(LostActorError, PipelineError):
                    await answer_of(handle.close.remote(), SLACK_S)
                ray.kill(handle)

    def least_busy(self, avoid: Collection[int] = ()) -> Slot:
        """The slot with the fewest calls, if possible none whose index is in `avoid`."""
        return min(self._slots, key=lambda slot: (slot.index in avoid, slot.num_running))

    async def call(self, slot: Slot, method: str, *arguments: Any, limit_s: float) -> Any:
        """Calls a method of the slot's session.

        Raises:
            LostActorError: the actor died, or did not answer in time; it is discarded.
            EngineError: there is no actor, and none can be started.
        """
        slot.num_running += 1
        try:
            handle = await self._actor(slot)
            try:
                return await answer_of(handle.call.remote(method, *arguments), limit_s)
            except LostActorError:
                await self._discard(slot, handle)
                raise
        finally:
            slot.num_running -= 1

    async def call_each(self, method: str, *arguments: Any, limit_s: float) -> list[Any]:
        """Calls a method of every session. An actor that is lost is replaced, and its result is None. Raises
        EngineError if it cannot be replaced."""

        async def call(slot: Slot) -> Any:
            try:
                return await self.call(slot, method, *arguments, limit_s=limit_s)
            except LostActorError:
                await self._actor(slot)
                return None

        return await _gather([call(slot) for slot in self._slots])

    async def _actor(self, slot: Slot) -> Any:
        """The slot's actor, started if there is none."""
        import ray

        async with slot.lock:
            if slot.handle is not None:
                return slot.handle
            share = self._share
            # SPREAD: across nodes, so that actors do not fill the bundle reserved for a training rank.
            actors: Any = ray.remote(PooledActor)
            handle: Any = actors.options(
                **share.rollout_actor.actor_options(), scheduling_strategy="SPREAD", max_concurrency=MAX_CONCURRENCY
            ).remote()
            try:
                opened = handle.open.remote(self.open_session, f"{self._purpose}-actor{slot.index}")
                await answer_of(opened, share.start_timeout_s)
            except LostActorError as error:
                ray.kill(handle)
                raise EngineError(
                    f"rollout actor {slot.index} did not start ({error}): check that the cluster has "
                    f"{share.rollout_actor} free for each of {share.num_rollout_actors} actors"
                ) from error
            except BaseException:
                ray.kill(handle)
                raise
            slot.handle = handle
            return handle

    async def _discard(self, slot: Slot, handle: Any) -> None:
        import ray

        async with slot.lock:
            if slot.handle is handle:
                slot.handle = None
                self.num_lost += 1
                ray.kill(handle)  # an unresponsive actor must not continue


@asynccontextmanager
async def open_pool(open_session: OpenSession, share: RayShare, *, purpose: str) -> AsyncIterator[ActorPool]:
    """Runs actors until the block ends.

    Raises:
        EngineError, EnvServerError: an actor does not start, or its session does not open.
    """
    pool = ActorPool(open_session, share, purpose=purpose)
    try:
        await pool.open()
        yield pool
    finally:
        await pool.close()


async def _gather(calls: list[Awaitable[Result]]) -> list[Result]:
    """Awaits all of them; the first failure cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_as_coroutine(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


async def _as_coroutine(call: Awaitable[Result]) -> Result:
    return await call
