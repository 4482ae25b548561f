"""Admits sglang servers: checks their settings, and makes each hold the engine's weights before it is sampled from.

Weights are identified by their content (`sglang_weights`): a server that already holds them is not loaded again,
regardless of which program loaded them. One program loads at a time, and weights that another program samples from are
not replaced (`sglang_locks`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines import sglang_locks
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_checks import check_logprob_scale, vision_cache_problem
from osworld_pipeline.rollout.engines.sglang_loading import FromFolder, LoadWeights
from osworld_pipeline.rollout.engines.sglang_server import CONTROL_TIMEOUT_S, SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import Adapter, Label, Weights, vision_digest

MAX_RELOADS = 5
RELOAD_WINDOW_S = 600.0
"""Within this time, lost weights are loaded into a server again at most MAX_RELOADS times."""
NUM_ADAPTERS_KEPT = 2
"""Adapters on a server: running requests may still sample from the previous one."""
LAG_POLL_S = 0.5
"""Retry interval of an engine that has not yet received the weights that the rest of its run has loaded."""


class NotLoadedError(EngineError):
    """A server refused weights."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    renderer: Renderer
    banned_ids: Sequence[int]
    owner: str
    """The run's name, recorded with weights that are loaded here; the same for all its engines."""
    request_timeout_s: float
    load: LoadWeights

    async def inspect(self, server: SglangServer, *, timeout_s: float) -> dict[str, Any]:
        """The server's model info, after its settings were checked. Call it under the server's lock.

        Raises:
            TransientError, EngineError: a setting is wrong, or the server does not answer.
        """
        info = await server.model_info(timeout_s=timeout_s)
        text = str(info["weight_version"])
        if text != server.last_label and not Label.parse(text).owner:
            # A new server process, which may have other settings.
            server.is_scale_checked = False
        server.last_label = text
        if not server.is_scale_checked:
            try:
                await check_logprob_scale(server, self.renderer, self.banned_ids, timeout_s=timeout_s)
            except TransientError:
                await sglang_locks.end_pause(server)
                raise
            server.is_scale_checked = True
        return info

    async def hold(self, server: SglangServer, weights: Weights, *, is_explicit: bool, timeout_s: float) -> None:
        """Makes the server hold the weights. Call it under the server's lock. `is_explicit`: a caller has just
        requested these weights; otherwise they are restored.

        Raises:
            TransientError: it may succeed later.
            NotLoadedError: the server refuses the weights.
            EngineError: the server cannot be sampled from.
        """
        info = await self.inspect(server, timeout_s=timeout_s)
        label = Label.parse(str(info["weight_version"]))
        # A server that failed may have been left paused, even with the right weights.
        if label.weights != weights.digest or server.num_failures or label.owner not in ("", self.owner):
            label = await self._hold_whole(server, weights, is_explicit=is_explicit)
        if weights.adapter is not None:
            folder = await self.load.place(server, weights.adapter.path, weights.adapter.name)
            await _hold_adapter(server, replace(weights.adapter, path=folder))
        server.last_label, server.owner = str(label), label.owner
        if label.owner == self.owner:
            await sglang_locks.renew_lease(server, self.owner, turn=0)
        server.held = weights.name

    async def _hold_whole(self, server: SglangServer, weights: Weights, *, is_explicit: bool) -> Label:
        async def are_there() -> bool:
            label, _ = await _label_of(server)
            return label.weights == weights.digest and not server.num_failures

        source = weights.source
        expires_s = sglang_locks.LOAD_LOCK_LIMIT_S if source is None else self.load.limit_s(source)
        async with sglang_locks.load_lock(server, are_there, expires_s=expires_s) as is_ours:
            label, info = await _label_of(server)
            if label.weights == weights.digest:
                if is_ours:
                    # A killed loader leaves the server paused.
                    await server.continue_generation()
                    label = await self._take_over(server, label)
                return label
            if not is_ours:
                raise TransientError(f"{shown(server.url)} changed its weights during admission")
            await self._require_free(server, label, info, weights, is_explicit=is_explicit)
            return await self._load(server, label, info, weights)

    async def _take_over(self, server: SglangServer, label: Label) -> Label:
        """The caller holds the load lock. Weights of a run that has ended get the label of this run, which may then
        replace them."""
        if label.owner in ("", self.owner) or await sglang_locks.is_leased(server, label.owner):
            return label
        label = replace(label, owner=self.owner)
        await server.relabel(str(label))
        return label

    async def _require_free(
        self, server: SglangServer, label: Label, info: dict[str, Any], weights: Weights, *, is_explicit: bool
    ) -> None:
        """Raises TransientError or EngineError if the server's weights must not be replaced."""
        where = shown(server.url)
        if weights.source is None and weights.trained is not None:
            raise TransientError(
                f"{where} has not received the weights {weights.digest} from the trainer",
                retry_after_s=LAG_POLL_S,
                is_busy=True,
            )
        if weights.source is None:
            raise EngineError(
                f"the sglang server at {where} holds other weights ({info['model_path']}, {label.weights}) than the "
                f"rest ({weights.digest}): start all of them on one checkpoint, or load weights first"
            )
        if not label.owner:
            if not is_explicit:
                _count_reload(server)
            return
        if label.owner == self.owner:
            if is_explicit:
                return
            raise TransientError(
                f"{where} already serves {info['model_path']} to the rest of this run, and this engine still samples "
                f"{weights.path or weights.digest}: it has not received the new weights",
                retry_after_s=LAG_POLL_S,
                is_busy=True,
            )
        if await sglang_locks.is_leased(server, label.owner):
            raise TransientError(
                f"the sglang server at {where} serves {info['model_path']} ({label.weights}) to another program, and "
                f"this one needs {weights.path or 'other weights'} ({weights.digest}): give each program its own "
                "servers (engine.urls), or wait until the other has ended"
            )

    async def _load(self, server: SglangServer, label: Label, info: dict[str, Any], weights: Weights) -> Label:
        assert weights.source is not None, "required by _require_free"
        assert weights.digest is not None, "known together with the source"
        if weights.trained is None:
            assert weights.path is not None, "the source"
            folder, vision = weights.path, await asyncio.to_thread(vision_digest, weights.path)
        else:
            folder, vision = weights.trained.like, weights.trained.vision
        is_changed = vision and vision != await _vision_of(label, info)
        if is_changed and not await sglang_locks.is_marked(server, sglang_locks.VISION_CHECKED):
            await self._check_vision_cache(server, label, info, folder)
        loaded = Label(weights=weights.digest, vision=vision, owner=self.owner)
        try:
            await self.load(server, weights.source, str(loaded))
        except TransientError:
            raise
        except EngineError as error:
            raise NotLoadedError(str(error)) from error
        return loaded

    async def _check_vision_cache(self, server: SglangServer, label: Label, info: dict[str, Any], path: Path) -> None:
        """Raises EngineError if the cache is on. The server's earlier weights are then loaded again, unless they were
        sent to it."""
        problem = await vision_cache_problem(
            server, self.renderer, self.banned_ids, path, load=self.load, timeout_s=self.request_timeout_s
        )
        if problem is None:
            await sglang_locks.leave_mark(server, sglang_locks.VISION_CHECKED)
            return
        # If the earlier weights cannot be loaded again, the label of the check remains, which no engine accepts.
        # Weights that were sent to the server are not those of its folder.
        if label.owner and not isinstance(self.load, FromFolder):
            raise EngineError(problem)
        with suppress(EngineError):
            await server.load_weights(Path(str(info["model_path"])), str(label))
        raise EngineError(problem)


async def _label_of(server: SglangServer) -> tuple[Label, dict[str, Any]]:
    info = await server.model_info(timeout_s=CONTROL_TIMEOUT_S)
    return Label.parse(str(info["weight_version"])), info


async def _vision_of(label: Label, info: dict[str, Any]) -> str:
    """Digest of the vision tower that the server holds; empty if unknown."""
    if label.owner:
        return label.vision
    with suppress(EngineError, OSError):
        return await asyncio.to_thread(vision_digest, Path(str(info["model_path"])))
    return ""


async def _hold_adapter(server: SglangServer, adapter: Adapter) -> None:
    try:
        await server.load_adapter(adapter.name, adapter.path)
    except TransientError:
        raise
    except EngineError as error:
        raise NotLoadedError(str(error)) from error
    if adapter.name not in server.adapters:
        server.adapters.append(adapter.name)
    while len(server.adapters) > NUM_ADAPTERS_KEPT:
        with suppress(EngineError):
            await server.unload_adapter(server.adapters.pop(0))


def _count_reload(server: SglangServer) -> None:
    now = time.monotonic()
    server.reloads = [at for at in server.reloads if now - at < RELOAD_WINDOW_S]
    if len(server.reloads) >= MAX_RELOADS:
        raise EngineError(
            f"the sglang server at {shown(server.url)} has lost its weights {MAX_RELOADS} times within "
            f"{RELOAD_WINDOW_S:.0f} s and is not loaded again: see its log for the cause"
        )
    server.reloads.append(now)
