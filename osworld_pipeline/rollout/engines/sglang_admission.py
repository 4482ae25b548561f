"""What must hold of an sglang server before it is sampled from: it is fit, and it holds the weights of the moment.

Weights are told by their content (`sglang_weights`): a server that holds them already is left as it is, whoever loaded
them. One program loads at a time, and what another samples from is not replaced (`sglang_claims`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines import sglang_claims
from osworld_pipeline.rollout.engines.http_calls import TransientError, shown
from osworld_pipeline.rollout.engines.sglang_checks import check_logprob_scale, vision_cache_problem
from osworld_pipeline.rollout.engines.sglang_server import CONTROL_TIMEOUT_S, SglangServer
from osworld_pipeline.rollout.engines.sglang_weights import Adapter, Label, Weights, vision_digest

MAX_RELOADS = 5
RELOAD_WINDOW_S = 600.0
"""Within which a server may lose its weights so many times; one that goes on is broken."""
NUM_ADAPTERS_KEPT = 2
"""On a server: requests may still sample from the one before."""
TOLD_SOON_S = 0.5
"""After which the rest of a run is asked again for what it has gone on to."""


class NotLoadedError(EngineError):
    """A server refused weights, for a reason of its own or of theirs."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    renderer: Renderer
    banned_ids: Sequence[int]
    owner: str
    """Of what is loaded here: the same for all engines of a run."""
    request_timeout_s: float

    async def inspect(self, server: SglangServer, *, timeout_s: float) -> dict[str, Any]:
        """Under the server's lock: what it says of its model, once it has been found fit.

        Raises:
            TransientError, EngineError: it is not, or cannot be asked.
        """
        info = await server.model_info(timeout_s=timeout_s)
        text = str(info["weight_version"])
        if text != server.last_label and not Label.parse(text).owner:
            # Not as it was left: a new process, perhaps with other settings.
            server.is_scale_checked = False
        server.last_label = text
        if not server.is_scale_checked:
            try:
                await check_logprob_scale(server, self.renderer, self.banned_ids, timeout_s=timeout_s)
            except TransientError:
                await sglang_claims.end_pause(server)
                raise
            server.is_scale_checked = True
        return info

    async def hold(self, server: SglangServer, weights: Weights, *, is_told: bool, timeout_s: float) -> None:
        """Under the server's lock: afterwards the server holds the weights. `is_told`: somebody has just said that the
        run goes on with them; else they are those it has had.

        Raises:
            TransientError: not now.
            NotLoadedError: the server refuses them.
            EngineError: it is not to be sampled from.
        """
        info = await self.inspect(server, timeout_s=timeout_s)
        label = Label.parse(str(info["weight_version"]))
        # One that failed may have been left paused: its weights alone say too little.
        if label.weights != weights.digest or server.num_failures:
            label = await self._hold_whole(server, weights, is_told=is_told)
        if weights.adapter is not None:
            await _hold_adapter(server, weights.adapter)
        server.last_label, server.owner = str(label), label.owner
        if label.owner:
            await sglang_claims.renew_use(server, label.owner, turn=0)
        server.held = weights.name

    async def _hold_whole(self, server: SglangServer, weights: Weights, *, is_told: bool) -> Label:
        async def are_there() -> bool:
            label, _ = await _label_of(server)
            return label.weights == weights.digest and not server.num_failures

        async with sglang_claims.loading(server, are_there) as is_ours:
            label, info = await _label_of(server)
            if label.weights == weights.digest:
                if is_ours:
                    # A loader that was killed leaves a server paused.
                    await server.continue_generation()
                return label
            if not is_ours:
                raise TransientError(f"{shown(server.url)} holds other weights from one moment to the next")
            await self._require_free(server, label, info, weights, is_told=is_told)
            return await self._load(server, label, info, weights)

    async def _require_free(
        self, server: SglangServer, label: Label, info: dict[str, Any], weights: Weights, *, is_told: bool
    ) -> None:
        """Whether what the server holds may be replaced. Raises TransientError, EngineError."""
        where = shown(server.url)
        if weights.path is None:
            raise EngineError(
                f"the sglang server at {where} holds other weights ({info['model_path']}, {label.weights}) than the "
                f"rest ({weights.digest}): start all of them on one checkpoint, or load weights first"
            )
        if not label.owner:
            if not is_told:
                _count_reload(server)
            return
        if label.owner == self.owner:
            if is_told:
                return
            raise TransientError(
                f"the rest of this run has gone on to {info['model_path']} on {where}, and this engine has not been "
                f"told yet: it samples {weights.path}",
                retry_after_s=TOLD_SOON_S,
                is_busy=True,
            )
        if await sglang_claims.is_used(server, label.owner):
            raise TransientError(
                f"the sglang server at {where} serves {info['model_path']} ({label.weights}) to another program, and "
                f"this one needs {weights.path} ({weights.digest}): give each servers of its own (engine.urls), or "
                "let the other end first"
            )

    async def _load(self, server: SglangServer, label: Label, info: dict[str, Any], weights: Weights) -> Label:
        path = weights.path
        assert path is not None, "asked for above"
        assert weights.digest is not None, "read with the path"
        vision = await asyncio.to_thread(vision_digest, path)
        problem = None
        if vision and vision != await _vision_of(label, info) and not await sglang_claims.is_vision_checked(server):
            problem = await vision_cache_problem(
                server, self.renderer, self.banned_ids, path, timeout_s=self.request_timeout_s
            )
            if problem is None:
                await sglang_claims.note_vision_checked(server)
        loaded = Label(weights=weights.digest, vision=vision, owner=self.owner)
        try:
            # Weights over stale images have a name that nobody asks for.
            await server.load_weights(path, str(loaded) if problem is None else f"stale-images-{weights.digest}")
        except TransientError:
            raise
        except EngineError as error:
            raise NotLoadedError(str(error)) from error
        if problem is not None:
            raise EngineError(problem)
        return loaded


async def _label_of(server: SglangServer) -> tuple[Label, dict[str, Any]]:
    info = await server.model_info(timeout_s=CONTROL_TIMEOUT_S)
    return Label.parse(str(info["weight_version"])), info


async def _vision_of(label: Label, info: dict[str, Any]) -> str:
    """Digest of the vision tower that the server holds; empty where nobody knows it."""
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
            f"{RELOAD_WINDOW_S:.0f} s and is given no more: see its log for why it starts anew"
        )
    server.reloads.append(now)
