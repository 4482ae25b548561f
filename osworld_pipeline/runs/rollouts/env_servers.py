"""A program's connections to its env servers, under a client name of its own. Desktops that a killed predecessor left
open are released before the first lease, instead of after the idle timeout."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.file_locks import TakenError, lock
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.rollout.env_client import EnvClient, EnvTimeouts
from osworld_pipeline.runs.metrics.observing import watching_fleet
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.shared_state import state_name
from osworld_pipeline.wire import EnvConfig


@asynccontextmanager
async def open_env_client(
    recipe: Recipe, state: StateDir, servers: EnvServers, *, purpose: str
) -> AsyncIterator[EnvClient]:
    """`purpose`: identifies the program and stays the same when it is restarted (a stage key).

    Raises:
        EnvServerError: no server answers, or two differ in desktop image or grader; names them.
        StoreError: the name cannot be locked in the state folder.
    """
    with client_name(state, purpose) as (name, is_sole):
        client = EnvClient(
            servers.urls,
            token=servers.token,
            client_id=name,
            env_config=env_config(recipe),
            settle=recipe.desktop.settle,
            may_mix_servers=recipe.desktop.may_mix_servers,
            timeouts=EnvTimeouts(request_s=recipe.env_request_timeout_s),
        )
        async with client:
            await client.connect()
            if is_sole:
                await client.close_left_over()
            with watching_fleet(client.fleet):
                yield client


def env_config(recipe: Recipe) -> EnvConfig:
    desktop = recipe.desktop
    screen_size = (desktop.screen_width, desktop.screen_height)
    return EnvConfig(
        screen_size=screen_size,
        image_size=fit_size(*screen_size, recipe.agent.max_pixels),
        require_a11y_tree=desktop.require_a11y_tree,
        require_terminal=desktop.require_terminal,
    )


@contextmanager
def client_name(state: StateDir, purpose: str) -> Iterator[tuple[str, bool]]:
    """A name, and whether it is the one of this purpose in this state. No other live process has the same name: while
    another process holds the name of the purpose, this one gets a unique name."""
    name = f"{purpose}@{state_name(state)}"
    path = state.clients / f"{digest_json(purpose)[:16]}.lock"
    try:
        held = lock(path)
    except TakenError:
        yield f"{name}-{uuid.uuid4().hex[:8]}", False
        return
    except OSError as error:
        raise StoreError(f"cannot lock {path}: {error.strerror}; the state folder must allow writing") from error
    try:
        yield name, True
    finally:
        held.release(remove=True)
