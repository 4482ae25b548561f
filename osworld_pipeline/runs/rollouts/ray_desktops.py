"""Desktops on a Ray cluster: env servers that run as actors on nodes with the resources that they need, as long as the
program that uses them.

One actor, on the program's own node, keeps them running and knows their URLs; clients ask it every few seconds. A
server for which no node has room waits as a pending actor, which is the demand that Ray's autoscaler sees. `ray_job`,
which runs the program, connects to Ray.
"""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.rollout.env_addresses import RAY_NAMESPACE, RAY_SCHEME
from osworld_pipeline.runs.messages import Info, Report
from osworld_pipeline.runs.placement import RayDesktops
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.keeper import Keeper
from osworld_pipeline.runs.rollouts.ray_calls import SLACK_S, LostActorError, answer_of, ask_to_stop, node_address
from osworld_pipeline.runs.rollouts.server_process import STOP_GRACE_S, ServerProcess, env_server_process
from osworld_pipeline.runs.shared_state import SharedState

POLL_S = 0.5
STOP_LIMIT_S = STOP_GRACE_S + SLACK_S
ABSENT_S = 10.0
"""Limit of stopping an actor that did not answer."""
MAX_CONCURRENCY = 1000


class EnvServerActor:
    """Runs one env server on its node."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server: ServerProcess | None = None
        self._is_over = threading.Event()
        self._lock = asyncio.Lock()

    async def is_placed(self) -> bool:
        """Returns as soon as a node has room for this actor."""
        return True

    async def start(self, desktops: RayDesktops, size: int, token: str, shared: SharedState, log: str) -> str:
        """`log`: name of its log. Returns its URL. Raises EnvServerError, StoreError."""
        state = await asyncio.to_thread(shared.here)
        folder = os.path.expanduser(desktops.folder)  # noqa: ASYNC240 - asks no disk
        process = env_server_process(
            [
                *("--host", node_address(), "--replicas", str(size)),
                *("--state-dir", folder, *desktops.options),
            ],
            token=token,
            log_path=state.logs / log,
            ready_timeout_s=desktops.ready_timeout_s,
            is_over=self._is_over,
        )
        async with self._lock:
            # The server ends with the thread that started it. Threads of the default executor do not end.
            self._server = await asyncio.to_thread(self._stack.enter_context, process)
        return self._server.url

    async def ended(self) -> str:
        """Waits until the server ends; returns how."""
        assert self._server is not None, "an actor is asked after it has started"
        while self._server.process.poll() is None:  # noqa: ASYNC110 - a process of its own
            await asyncio.sleep(POLL_S)
        return self._server.how_it_ended()

    async def stop(self) -> None:
        """Stops it even while it starts."""
        self._is_over.set()
        async with self._lock:
            await asyncio.to_thread(self._stack.close)


class DesktopsActor:
    """Keeps the env servers of one program running."""

    def __init__(self, desktops: RayDesktops, token: str, state: StateDir) -> None:
        start, logs = _ServerStarter(desktops, token, SharedState.of(state)), state.logs
        self._keeper = Keeper(len(desktops.sizes), start, kind="env server", error=EnvServerError)
        logs.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=logs / "env-servers.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(message)s",
            force=True,
        )

    async def open(self, timeout_s: float) -> None:
        """Returns when the first server runs. Raises EnvServerError."""
        await self._keeper.open()
        await self._keeper.wait_ready(timeout_s)

    async def urls(self) -> list[str]:
        return [server.url for server in self._keeper.running]

    async def close(self) -> None:
        await self._keeper.close()


class _ServerStarter:
    def __init__(self, desktops: RayDesktops, token: str, shared: SharedState) -> None:
        self._desktops, self._token, self._shared = desktops, token, shared

    async def __call__(self, number: int) -> "_RayServer":
        import ray

        size = self._desktops.sizes[number]
        actors: Any = ray.remote(EnvServerActor)
        resources = self._desktops.server(size).actor_options()
        actor = actors.options(**resources, scheduling_strategy="SPREAD", max_concurrency=MAX_CONCURRENCY).remote()
        try:
            await _answer(actor.is_placed.remote())
            try:
                start = actor.start.remote(self._desktops, size, self._token, self._shared, f"env-server-{number}.log")
                url = await _answer(start)
            except BaseException:
                await ask_to_stop(actor, "stop", limit_s=STOP_LIMIT_S)
                raise
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, LostActorError):
                raise EnvServerError(f"its actor was lost during its start: {error}") from error
            raise
        return _RayServer(actor, url, size)


class _RayServer:
    def __init__(self, actor: Any, url: str, size: int) -> None:
        self._actor, self.url, self._size, self._is_lost = actor, url, size, False

    def __str__(self) -> str:
        return f"at {self.url} with {self._size} desktops"

    async def ended(self) -> str:
        try:
            return await _answer(self._actor.ended.remote())
        except LostActorError as error:
            self._is_lost = True
            return f"its actor was lost: {error}"
        except EnvServerError as error:
            return str(error)

    async def stop(self) -> None:
        import ray

        await ask_to_stop(self._actor, "stop", limit_s=ABSENT_S if self._is_lost else STOP_LIMIT_S)
        ray.kill(self._actor)


async def _answer(call: Any) -> Any:
    """Does the same as answer_of, without a limit: it waits until a node has room for the actor, or until its server
    ends. Raises EnvServerError also for what the actor did not expect, such as a log that cannot be written."""
    from ray.exceptions import RayTaskError

    try:
        return await answer_of(call, None)
    except RayTaskError as error:
        raise EnvServerError(f"its actor failed with {error.cause!r}") from error


@contextmanager
def ray_desktops(
    desktops: RayDesktops, state: StateDir, report: Report, *, token: str | None, timeout_s: float
) -> Iterator[EnvServers]:
    """Starts the desktops of a job on the cluster that this process is connected to; they are stopped when the block
    ends, or when this process dies. Reports the pages of the servers that run at the start.

    `token`: of the servers; None for a new one, which no other program has.

    Raises:
        EnvServerError: no server started within `timeout_s`, or each failed; quotes the last failure.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name, token = f"desktops-{secrets.token_hex(8)}", token or secrets.token_urlsafe(24)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actors: Any = ray.remote(DesktopsActor)
    keeper = actors.options(
        name=name, namespace=RAY_NAMESPACE, num_cpus=0, scheduling_strategy=here, max_concurrency=MAX_CONCURRENCY
    ).remote(desktops, token, state)
    try:
        try:
            urls = asyncio.run(_opened(keeper, timeout_s))
        except (EnvServerError, LostActorError) as error:
            each = desktops.server(desktops.sizes[0])
            is_lost = isinstance(error, LostActorError)
            cause = f"the actor that starts the env servers was lost: {error}" if is_lost else str(error)
            raise EnvServerError(f"{cause}; an env server needs {each} on one node") from error
        for url in urls:
            report(Info(message=f"desktops: {url}/status"))
        yield EnvServers(urls=(f"{RAY_SCHEME}://{name}",), token=token, num_replicas=sum(desktops.sizes))
    finally:
        asyncio.run(ask_to_stop(keeper, "close", limit_s=STOP_LIMIT_S + SLACK_S))
        ray.kill(keeper)


async def _opened(keeper: Any, timeout_s: float) -> list[str]:
    """The URLs of the servers that run then."""
    await answer_of(keeper.open.remote(timeout_s), timeout_s + SLACK_S)
    return await answer_of(keeper.urls.remote(), SLACK_S)
