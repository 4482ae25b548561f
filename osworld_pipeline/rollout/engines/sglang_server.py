"""One sglang server: what is known of it, and the calls that weights and health need."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import JsonClient, MissingError, TransientError, shown

LOAD_TIMEOUT_S = 900.0
"""Of loading weights from disk: a large checkpoint on a network's file system."""
CONTROL_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


@dataclass(kw_only=True)
class Standing:
    """What an engine that compares servers (`sglang_newcomers`) knows of one."""

    has_passed: bool = False
    held_back_until: float = 0.0
    """Monotonic time before which it is not compared again."""
    is_refused: bool = False
    """It was compared and differs; False where it was not compared to the end."""
    reason: str = ""
    """Why it was held back last."""
    num_tries: int = 0
    """Comparisons since it last passed."""

    def admit(self) -> None:
        self.has_passed, self.is_refused, self.reason = True, False, ""
        self.held_back_until, self.num_tries = 0.0, 0

    def hold_back(self, reason: str, pause_s: float, *, is_refused: bool) -> None:
        self.has_passed, self.is_refused, self.reason = False, is_refused, reason
        self.held_back_until = time.monotonic() + pause_s
        self.num_tries += 1


@dataclass(kw_only=True, eq=False)
class SglangServer:
    url: str
    client: JsonClient
    held: str | None = None
    """Name of the weights that it is known to hold; None while unknown, and then it is not sampled from."""
    last_label: str | None = None
    """The label it last reported."""
    owner: str = ""
    """The run that loaded its weights."""
    num_running: int = 0
    num_failures: int = 0
    out_until: float = 0.0
    """Monotonic time until which it is left out."""
    is_scale_checked: bool = False
    reloads: list[float] = field(default_factory=list)
    """Monotonic times at which lost weights were loaded into it again."""
    adapters: list[str] = field(default_factory=list)
    """Loaded by this engine, oldest first."""
    standing: Standing = field(default_factory=Standing)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights or its checks are seen to."""

    def lost(self) -> None:
        """What it holds is not known, and it may be another process by now."""
        self.held = None
        self.standing.has_passed = False

    def failed(self, error: EngineError) -> None:
        """It is left out for a while, the longer the more often it fails."""
        if isinstance(error, TransientError) and error.is_busy:
            self.out_until = time.monotonic() + (error.retry_after_s or FIRST_PAUSE_S)
            return
        self.lost()
        self.num_failures += 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.num_failures - 1, 10))
        # Jitter: engines that share it must not all retry at once.
        self.out_until = time.monotonic() + random.uniform(0.5, 1.0) * pause_s

    def answered(self) -> None:
        self.num_failures = 0
        self.out_until = 0.0

    async def generate(self, body: bytes, *, timeout_s: float) -> dict[str, Any]:
        return await self.client.post(f"{self.url}/generate", body, timeout_s=timeout_s)

    async def model_info(self, *, timeout_s: float) -> dict[str, Any]:
        """Model, architecture and label of the weights.

        Raises:
            TransientError, EngineError: it does not answer, or is no sglang server that sees images.
        """
        info = await self.client.get(f"{self.url}/model_info", timeout_s=timeout_s)
        if "model_path" not in info:
            raise EngineError(f"{shown(self.url)}/model_info did not answer as an sglang server does")
        if info.get("has_image_understanding") is False:
            raise EngineError(f"the sglang server at {shown(self.url)} serves a model that sees no images")
        if "weight_version" not in info:
            raise EngineError(
                f"the sglang server at {shown(self.url)} does not say which weights it holds: use a newer sglang"
            )
        return info

    async def load_weights(self, path: Path, label: str) -> None:
        """Weights from disk under a label, between two tokens of whatever runs: what was sampled stays, and goes on
        with the new weights over a cache computed anew.

        Raises:
            TransientError, EngineError: it did not, and what it holds now is not known.
        """
        self.held = None
        body = orjson.dumps({"model_path": str(path), "weight_version": label, "flush_cache": True})
        try:
            try:
                # `retract`, because `in_place` would go on over keys and values that the old weights made.
                await self._control("/pause_generation", {"mode": "retract"})
                url = f"{self.url}/update_weights_from_disk"
                answer = await self.client.post(url, body, timeout_s=LOAD_TIMEOUT_S)
            finally:
                # Shielded: whoever gives up here must not leave a server that is paused for ever.
                await asyncio.shield(self.continue_generation())
        except TransientError:
            raise
        except EngineError as error:
            raise EngineError(f"the weights at {path} were not loaded: {error}") from error
        if not answer.get("success"):
            raise EngineError(f"the weights at {path} were not loaded: {shown(self.url)}: {answer.get('message')}")

    async def relabel(self, label: str) -> None:
        """Another label for the weights that it holds."""
        await self._control("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def continue_generation(self) -> None:
        """No effect on a server that is not paused."""
        await self._control("/continue_generation", {})

    async def load_adapter(self, name: str, path: Path) -> None:
        """Loads a LoRA adapter in peft's format; does nothing where an adapter of that name is loaded.

        Raises:
            TransientError, EngineError: it did not.
        """
        if name in await self._adapter_names():
            return
        body = orjson.dumps({"lora_name": name, "lora_path": str(path)})
        try:
            await self.client.post(f"{self.url}/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)
        except TransientError:
            raise
        except EngineError as error:
            if name in await self._adapter_names():  # another engine was faster
                return
            raise EngineError(
                f"the adapter at {path} was not loaded: {error}; the server must run with --enable-lora and a "
                "--max-lora-rank and --lora-target-modules that hold it"
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """The server waits for requests that still sample from it."""
        body = orjson.dumps({"lora_name": name})
        await self.client.post(f"{self.url}/unload_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)

    async def open_session(self, name: str, *, limit_s: float | None) -> bool:
        """Whether it was opened; False where it is open already. It expires after `limit_s`.

        Raises:
            TransientError: the server does not answer.
            EngineError: it has no sessions.
        """
        body = orjson.dumps({"capacity_of_str_len": 0, "session_id": name, "timeout": limit_s})
        try:
            # Answered only after a load in progress has ended.
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
        """Those of the servers behind it where it is a router; empty where it is a server."""
        answer = await self.client.get(f"{self.url}/workers", timeout_s=timeout_s, allow_missing=True)
        workers = answer.get("workers")
        if not isinstance(workers, list):
            return ()
        return tuple(
            str(worker["url"]).rstrip("/") for worker in workers if isinstance(worker, dict) and "url" in worker
        )

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        await self.client.post(f"{self.url}{path}", orjson.dumps(body), timeout_s=CONTROL_TIMEOUT_S)
