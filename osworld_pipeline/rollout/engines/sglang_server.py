"""State of one sglang server, and its calls for weights and health."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import JsonClient, MissingError, TransientError, shown

LOAD_TIMEOUT_S = 900.0
"""Limit of loading weights from disk: a large checkpoint on a network file system."""
CONTROL_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


@dataclass(kw_only=True)
class Standing:
    """State of a server in an engine that compares servers (`sglang_newcomers`)."""

    has_passed: bool = False
    held_back_until: float = 0.0
    """Monotonic time before which it is not compared again."""
    is_refused: bool = False
    """The comparison found a difference; False if the comparison did not finish."""
    reason: str = ""
    """Reason of the last refusal or failure."""
    num_tries: int = 0
    """Comparisons since it last passed."""

    def admit(self) -> None:
        self.has_passed, self.is_refused, self.reason = True, False, ""
        self.held_back_until, self.num_tries = 0.0, 0

    def hold_back(self, reason: str, pause_s: float, *, is_refused: bool) -> None:
        self.has_passed, self.is_refused, self.reason = False, is_refused, reason
        self.held_back_until = time.monotonic() + pause_s
        self.num_tries += 1


class Gate:
    """Lets this program's requests to a server through. It is closed while weights are loaded if no response may mix
    old and new weights."""

    def __init__(self) -> None:
        self._opened, self._quiet = asyncio.Event(), asyncio.Event()
        self._num_inside = 0
        self._opened.set()
        self._quiet.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Lets one request pass; waits while the gate is closed."""
        await self._opened.wait()
        self._num_inside += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._quiet.set()

    @asynccontextmanager
    async def closed(self, *, limit_s: float) -> AsyncIterator[None]:
        """Waits for the requests inside, at most `limit_s`, and keeps others out during the block."""
        self._opened.clear()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._quiet.wait()
            yield
        finally:
            self._opened.set()


@dataclass(kw_only=True, eq=False)
class SglangServer:
    url: str
    client: JsonClient
    pause_mode: Literal["retract", "abort"] = "retract"
    """What a pause does to running requests: `retract` keeps their tokens, and `abort` ends them. sglang's `in_place`
    would reuse keys and values of the old weights."""
    gate: Gate = field(default_factory=Gate)
    held: str | None = None
    """Name of the weights that it is known to hold; None if unknown, and then it is not sampled from."""
    last_label: str | None = None
    """The label that it last reported."""
    owner: str = ""
    """The run that loaded its weights."""
    num_running: int = 0
    num_failures: int = 0
    out_until: float = 0.0
    """Monotonic time until which it is excluded."""
    is_scale_checked: bool = False
    reloads: list[float] = field(default_factory=list)
    """Monotonic times at which lost weights were reloaded."""
    adapters: list[str] = field(default_factory=list)
    """Adapters loaded by this engine, oldest first."""
    standing: Standing = field(default_factory=Standing)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights are loaded or its settings are checked."""

    def lost(self) -> None:
        """Its weights are unknown, and it may be a new process."""
        self.held = None
        self.standing.has_passed = False

    def failed(self, error: EngineError) -> None:
        """Excludes it for a while, longer after each failure; a busy server for the time that it requested."""
        if isinstance(error, TransientError) and error.is_busy:
            self.out_until = time.monotonic() + (error.retry_after_s or FIRST_PAUSE_S)
            return
        self.lost()
        self.num_failures += 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.num_failures - 1, 10))
        # Jitter: engines that share it must not all retry at the same time.
        self.out_until = time.monotonic() + random.uniform(0.5, 1.0) * pause_s

    def answered(self) -> None:
        self.num_failures = 0
        self.out_until = 0.0

    async def generate(self, body: bytes, *, timeout_s: float) -> dict[str, Any]:
        return await self.client.post(f"{self.url}/generate", body, timeout_s=timeout_s)

    async def model_info(self, *, timeout_s: float) -> dict[str, Any]:
        """Model, architecture and label of the weights.

        Raises:
            TransientError, EngineError: it does not answer, or is not an sglang server with image support.
        """
        info = await self.client.get(f"{self.url}/model_info", timeout_s=timeout_s)
        if "model_path" not in info:
            raise EngineError(f"{shown(self.url)}/model_info did not answer like an sglang server")
        if info.get("has_image_understanding") is False:
            raise EngineError(f"the sglang server at {shown(self.url)} serves a model without image input")
        if "weight_version" not in info:
            raise EngineError(
                f"the sglang server at {shown(self.url)} does not report which weights it holds: use a newer sglang"
            )
        return info

    async def load_weights(self, path: Path, label: str) -> None:
        """Loads weights from disk under a label, between two tokens of running requests. Where their tokens are kept,
        sampling continues with the new weights over a recomputed cache.

        Raises:
            TransientError, EngineError: loading failed, and the weights that the server holds are unknown.
        """
        self.held = None
        body = orjson.dumps({"model_path": str(path), "weight_version": label, "flush_cache": True})
        try:
            try:
                await self.pause_generation()
                url = f"{self.url}/update_weights_from_disk"
                answer = await self.client.post(url, body, timeout_s=LOAD_TIMEOUT_S)
            finally:
                # Shielded: a cancelled caller must not leave the server paused.
                await asyncio.shield(self.continue_generation())
        except TransientError:
            raise
        except EngineError as error:
            raise EngineError(f"the weights at {path} were not loaded: {error}") from error
        if not answer.get("success"):
            raise EngineError(f"the weights at {path} were not loaded: {shown(self.url)}: {answer.get('message')}")

    async def pause_generation(self) -> None:
        await self._control("/pause_generation", {"mode": self.pause_mode})

    async def num_ranks(self) -> int:
        """Processes that hold its weights.

        Raises:
            TransientError, EngineError: it does not answer, or cannot receive weights from a process group.
        """
        info = await self.client.get(f"{self.url}/server_info", timeout_s=CONTROL_TIMEOUT_S)
        try:
            sizes = {name: int(info[name]) for name in ("tp_size", "pp_size", "dp_size")}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{shown(self.url)}/server_info does not report its number of ranks ({error})") from error
        if sizes["dp_size"] != 1 or sizes["pp_size"] != 1:
            raise EngineError(
                f"the sglang server at {shown(self.url)} runs with --dp-size {sizes['dp_size']} and --pp-size "
                f"{sizes['pp_size']}, and only one with 1 for both can receive a broadcast: start one server for each "
                'replica, or set engine.weights to "upload" or "folder"'
            )
        return sizes["tp_size"]

    async def begin_update(self) -> None:
        """Prepares it to receive weights; ends the update of a killed program first."""
        try:
            await self.update_call("/begin_weight_update", {})
        except TransientError:
            raise
        except EngineError as error:
            if "already open" not in str(error):
                raise
            await self.end_update()
            await self.update_call("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self.update_call("/end_weight_update", {})

    async def update_call(self, path: str, body: Mapping[str, Any]) -> None:
        """One call of a transfer of weights.

        Raises:
            TransientError, EngineError: it failed.
        """
        answer = await self.client.post(f"{self.url}{path}", orjson.dumps(body), timeout_s=CONTROL_TIMEOUT_S)
        if not answer.get("success"):
            raise EngineError(f"{shown(self.url)}{path}: {answer.get('message')}")

    async def relabel(self, label: str) -> None:
        """Sets another label for the weights that it holds."""
        await self._control("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def continue_generation(self) -> None:
        """No effect on a server that is not paused."""
        await self._control("/continue_generation", {})

    async def load_adapter(self, name: str, path: Path) -> None:
        """Loads a LoRA adapter in peft's format; does nothing if an adapter of that name is loaded.

        Raises:
            TransientError, EngineError: loading failed.
        """
        if name in await self._adapter_names():
            return
        body = orjson.dumps({"lora_name": name, "lora_path": str(path)})
        try:
            await self.client.post(f"{self.url}/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)
        except TransientError:
            raise
        except EngineError as error:
            if name in await self._adapter_names():  # another engine has loaded it
                return
            raise EngineError(
                f"the adapter at {path} was not loaded: {error}; the server must run with --enable-lora and a "
                "--max-lora-rank and --lora-target-modules that fit it"
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """The server waits for requests that still sample from it."""
        body = orjson.dumps({"lora_name": name})
        await self.client.post(f"{self.url}/unload_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)

    async def open_session(self, name: str, *, limit_s: float | None) -> bool:
        """Returns False if it is already open. It expires after `limit_s`.

        Raises:
            TransientError: the server does not answer.
            EngineError: it has no sessions.
        """
        body = orjson.dumps({"capacity_of_str_len": 0, "session_id": name, "timeout": limit_s})
        try:
            # The answer comes only after a load in progress has ended.
            await self.client.post(f"{self.url}/open_session", body, timeout_s=LOAD_TIMEOUT_S, wants_object=False)
        except (TransientError, MissingError):
            raise
        except EngineError as error:
            if "session" not in str(error):
                raise
            return False
        return True

    async def close_session(self, name: str) -> None:
        body = orjson.dumps({"session_id": name})
        await self.client.post(f"{self.url}/close_session", body, timeout_s=CONTROL_TIMEOUT_S, wants_object=False)

    async def _adapter_names(self) -> set[str]:
        answer = await self.client.get(f"{self.url}/v1/models", timeout_s=CONTROL_TIMEOUT_S)
        return {str(model["id"]) for model in answer.get("data") or () if isinstance(model, dict) and "id" in model}

    async def worker_urls(self, *, timeout_s: float) -> tuple[str, ...]:
        """The URLs of the servers behind a router; empty if this is a server."""
        answer = await self.client.get(f"{self.url}/workers", timeout_s=timeout_s, allow_missing=True)
        workers = answer.get("workers")
        if not isinstance(workers, list):
            return ()
        return tuple(
            str(worker["url"]).rstrip("/") for worker in workers if isinstance(worker, dict) and "url" in worker
        )

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        await self.client.post(f"{self.url}{path}", orjson.dumps(body), timeout_s=CONTROL_TIMEOUT_S)
