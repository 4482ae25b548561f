"""Runs sglang servers within a block: `engine.launch` of a recipe."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EngineError
from osworld_pipeline.policy_servers.commands import ServerCommand, server_commands
from osworld_pipeline.policy_servers.supervisor import FAILED, KILL_S, STOP_S, Message, Orders, ServerOrder
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import EngineSection

SLACK_S = 10.0


@asynccontextmanager
async def launched_servers(recipe: Recipe, state: StateDir, checkpoint: Path) -> AsyncIterator[Recipe]:
    """Starts the servers of `engine.launch` with the weights of `checkpoint`; yields the recipe with their addresses
    once all of them are ready. A server that ends or hangs is restarted, until this happens too often
    (`supervisor.MAX_RESTARTS`). All stop with the block or with this process in any case. A recipe without
    `engine.launch` is yielded unchanged.

    Raises:
        EngineError: sglang or GPUs are missing, or a server did not become ready; quotes the end of its log.
    """
    section = recipe.engine.launch
    if section is None:
        yield recipe
        return
    ports = _free_ports(section.num_servers)
    commands = await asyncio.to_thread(server_commands, recipe, checkpoint, ports=ports)
    state.logs.mkdir(parents=True, exist_ok=True)
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.supervisor"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        await _ready(supervisor, _orders(commands, state, section.start_timeout_s))
        engine = recipe.engine.model_copy(update={"urls": tuple(one.url for one in commands), "launch": None})
        yield recipe.model_copy(update={"engine": engine})
    finally:
        await _stop(supervisor)


class SharedServers:
    """The servers of one recipe for several sessions of a program, launched on first use."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._stack = AsyncExitStack()
        self._engine: EngineSection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def named_in(self, recipe: Recipe, checkpoint: Path) -> Recipe:
        """The result of `launched_servers`; the servers start with the first `checkpoint`."""
        if recipe.engine.launch is None:
            return recipe
        if self._engine is None:
            launched = await self._stack.enter_async_context(launched_servers(recipe, self._state, checkpoint))
            self._engine = launched.engine
        return recipe.model_copy(update={"engine": self._engine})


def _orders(commands: tuple[ServerCommand, ...], state: StateDir, start_timeout_s: float) -> Orders:
    return Orders(
        parent_pid=os.getpid(),
        start_timeout_s=start_timeout_s,
        servers=tuple(
            ServerOrder(
                url=command.url,
                arguments=command.arguments,
                environment=command.environment,
                log=str((state.logs / f"policy-server-{number}.log").resolve()),
            )
            for number, command in enumerate(commands, start=1)
        ),
    )


async def _ready(supervisor: asyncio.subprocess.Process, orders: Orders) -> None:
    """Waits for all servers. Raises EngineError."""
    assert supervisor.stdin is not None, "opened with a pipe"
    assert supervisor.stdout is not None, "opened with a pipe"
    with suppress(BrokenPipeError, ConnectionResetError):  # its end is detected below
        supervisor.stdin.write(orders.as_line())
        await supervisor.stdin.drain()
    try:
        async with asyncio.timeout(orders.start_timeout_s + STOP_S + KILL_S + SLACK_S):
            for _ in orders.servers:
                line = await supervisor.stdout.readline()
                if not line:
                    status = await supervisor.wait()
                    raise EngineError(f"the supervisor of the policy servers ended with status {status}")
                message = Message.parse(line)
                if message.kind == FAILED:
                    raise EngineError(message.text)
    except TimeoutError as error:
        raise EngineError("the supervisor of the policy servers does not answer") from error


async def _stop(supervisor: asyncio.subprocess.Process) -> None:
    assert supervisor.stdin is not None, "opened with a pipe"
    supervisor.stdin.close()
    try:
        async with asyncio.timeout(STOP_S + KILL_S + SLACK_S):
            await supervisor.wait()
    except TimeoutError:
        supervisor.kill()
        await supervisor.wait()


def _free_ports(count: int) -> list[int]:
    """Free ports on loopback; distinct, because all are held until the last is found."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
