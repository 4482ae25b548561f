"""A pool of Ray actors on any node. Each has an open session and runs many calls concurrently. `ray_job`, which runs
the program, connects to Ray.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

from osworld_pipeline.errors import EngineError
from osworld_pipeline.runs.metrics.serving import Endpoint, endpoint_of_actors, observed_actor
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts.keeper import Keeper
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S, LostActorError, answer_of, ask_to_stop, node_address
from osworld_pipeline.wire.tracing import flush, start_tracing

Result = TypeVar("Result")
OpenSession = Callable[[str], AbstractAsyncContextManager[Any]]
"""Called in the actor with a client id of its own; picklable. Opens the object whose methods are called."""
MAX_CONCURRENCY = 1000
"""Limit of concurrent calls to one actor; the caller limits the number of concurrent episodes."""
GATHER_S = 60.0
"""How long a program waits at its start for further actors once one runs, so that all share its first episodes."""


class PooledActor:
    """The class that runs inside a Ray actor."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._session: Any = None

    async def node(self) -> str:
        """Address of the actor's node; answers as soon as one has room for the actor."""
        return node_address()

    async def open(self, open_session: OpenSession, client_id: str, endpoint: Endpoint | None = None) -> None:
        """`endpoint`: where its metrics are served, if they are."""
        start_tracing("osworld-pipeline")
        self._stack.enter_context(observed_actor(endpoint, node_address))
        self._session = await self._stack.enter_async_context(open_session(client_id))

    async def call(self, method: str, *arguments: Any) -> Any:
        assert self._session is not None, "an actor is opened before it is used"
        return await getattr(self._session, method)(*arguments)

    async def live(self) -> None:
        """Never returns; the call fails when the actor has died."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._stack.aclose()
        # Ray kills the actor without its exit handlers.
        await asyncio.to_thread(flush)


class OpenActor:
    """An actor with an open session, until it is lost."""

    def __init__(self, index: int, handle: Any, node: str, on_lost: Callable[[], None]) -> None:
        self.index = index
        self.handle = handle
        self.num_running = 0
        self._node = node
        self._on_lost = on_lost
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __str__(self) -> str:
        return f"on {self._node}"

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    def lose(self, how: str) -> None:
        """It gets no further call and is replaced. Idempotent."""
        if not self._lost.done():
            self._lost.set_result(how)
            self._on_lost()

    async def ended(self) -> str:
        watch = asyncio.create_task(self._watch())
        try:
            return await asyncio.shield(self._lost)
        finally:
            watch.cancel()

    async def stop(self) -> None:
        """If it still responds, it releases its desktops."""
        import ray

        if not self.is_lost:
            await ask_to_stop(self.handle, "close", limit_s=SLACK_S)
        ray.kill(self.handle)  # an unresponsive actor must not continue

    async def _watch(self) -> None:
        try:
            await answer_of(self.handle.live.remote(), None)
        except LostActorError as error:
            self.lose(str(error))


class ActorPool:
    """The actors of one program. Calls go to those that run; one that is lost is started again, wherever a node has
    room for it. Its methods re-raise our own exceptions from a session unchanged."""

    def __init__(self, open_session: OpenSession, share: RayShare, *, purpose: str) -> None:
        self._open_session = open_session
        self._update: tuple[str, tuple[Any, ...], float] = ("", (), 0.0)
        """The last update: method, arguments, and limit in seconds."""
        self._share = share
        self._purpose = purpose
        self._keeper = Keeper(share.num_rollout_actors, self._start, kind="rollout actor", error=EngineError)
        self.num_lost = 0
        """Actors that died or stopped responding, over the whole run."""

    async def open(self) -> None:
        """Starts the actors. Returns when each runs or has failed once, or when one runs and the others did not follow
        within GATHER_S. Raises PipelineError: none starts."""
        await self._keeper.open()
        try:
            await self._running()
        except EngineError as error:
            raise EngineError(
                f"{error}; each of {self._share.num_rollout_actors} rollout actors needs {self._share.rollout_actor} "
                "on one node"
            ) from error
        await self._keeper.wait_settled(GATHER_S)

    async def close(self) -> None:
        """Idempotent; actors that still respond release their desktops."""
        await self._keeper.close()

    async def least_busy(self, avoid: Collection[int] = ()) -> OpenActor:
        """The running actor with the fewest calls, if possible none whose index is in `avoid`. If all are lost, waits
        for the first that runs again. Raises PipelineError: none starts."""
        return min(await self._running(), key=lambda actor: (actor.index in avoid, actor.num_running))

    async def call(self, actor: OpenActor, method: str, *arguments: Any, limit_s: float) -> Any:
        """Calls a method of the actor's session.

        Raises:
            LostActorError: the actor died, or did not answer in time; it is replaced.
        """
        actor.num_running += 1
        try:
            return await answer_of(actor.handle.call.remote(method, *arguments), limit_s)
        except LostActorError as error:
            actor.lose(str(error))
            raise
        finally:
            actor.num_running -= 1

    async def call_each(self, method: str, *arguments: Any, limit_s: float) -> list[Any]:
        """Calls a method of the session of every running actor. If an actor is lost, its result is None. Raises
        PipelineError: no actor starts."""

        async def call(actor: OpenActor) -> Any:
            with suppress(LostActorError):
                return await self.call(actor, method, *arguments, limit_s=limit_s)

        return await _gather([call(actor) for actor in await self._running()])

    async def update(self, open_session: OpenSession, method: str, *arguments: Any, limit_s: float) -> None:
        """Does the same as call_each, for a method that gives a session the state of one that `open_session` opens.
        Actors that start from now on use `open_session`; one that is just starting is updated before its first call."""
        self._open_session, self._update = open_session, (method, arguments, limit_s)
        await self.call_each(method, *arguments, limit_s=limit_s)

    async def _running(self) -> list[OpenActor]:
        """The running actors, at least one."""
        while not (actors := [actor for actor in self._keeper.running if not actor.is_lost]):
            await asyncio.sleep(0)  # the keeper takes note of lost actors
            await self._keeper.wait_ready(self._share.start_timeout_s)
        return actors

    async def _start(self, index: int) -> OpenActor:
        """Raises PipelineError."""
        import ray
        from ray.exceptions import RayTaskError

        # SPREAD: across nodes, so that actors do not fill the bundle reserved for a training rank.
        actors: Any = ray.remote(PooledActor)
        handle: Any = actors.options(
            **self._share.rollout_actor.actor_options(), scheduling_strategy="SPREAD", max_concurrency=MAX_CONCURRENCY
        ).remote()
        try:
            node = await answer_of(handle.node.remote(), None)
            await self._open(handle, f"{self._purpose}-actor{index}")
        except BaseException as error:
            ray.kill(handle)
            if isinstance(error, LostActorError):
                raise EngineError(f"it was lost during its start: {error}") from error
            if isinstance(error, RayTaskError):
                raise EngineError(f"its session failed with {error.cause!r}") from error
            raise
        return OpenActor(index, handle, node, self._count_loss)

    async def _open(self, handle: Any, client_id: str) -> None:
        opened_with = self._open_session
        opening = handle.open.remote(opened_with, client_id, endpoint_of_actors())
        await answer_of(opening, self._share.start_timeout_s)
        while opened_with is not self._open_session:
            opened_with, (method, arguments, limit_s) = self._open_session, self._update
            await answer_of(handle.call.remote(method, *arguments), limit_s)

    def _count_loss(self) -> None:
        self.num_lost += 1


@asynccontextmanager
async def open_pool(open_session: OpenSession, share: RayShare, *, purpose: str) -> AsyncIterator[ActorPool]:
    """Runs actors until the block ends.

    Raises:
        PipelineError: no actor starts, or none of their sessions opens.
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
