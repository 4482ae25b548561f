"""One sglang server: what is known of it, and the calls that weights and health need."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.http_calls import JsonClient, TransientError, shown

LOAD_TIMEOUT_S = 900.0
"""Of loading weights from disk: a large checkpoint on a network's file system."""
CONTROL_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    label: str | None
    """What servers report as their `weight_version`: of this run alone, so that no two sets are taken for one. None
    until a server has told what it was started with."""
    policy_version: int
    path: Path | None = None
    """None for what the servers were started with."""


@dataclass(kw_only=True, eq=False)
class SglangServer:
    url: str
    client: JsonClient
    label: str | None = None
    """Of the weights that it is known to hold; None while that is not known, and then nothing is sampled there."""
    last_label: str | None = None
    """As it was last known; a server that holds another has been started anew."""
    num_running: int = 0
    num_failures: int = 0
    out_until: float = 0.0
    """Monotonic time until which it is left out."""
    is_scale_checked: bool = False
    is_vision_checked: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its weights or its checks are seen to."""

    def failed(self, error: EngineError) -> None:
        """It is left out for a while, the longer the more often it fails."""
        if isinstance(error, TransientError) and error.is_busy:
            self.out_until = time.monotonic() + (error.retry_after_s or FIRST_PAUSE_S)
            return
        self.label = None
        self.num_failures += 1
        self.out_until = time.monotonic() + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.num_failures - 1, 10))

    def holds(self, label: str) -> None:
        self.label = self.last_label = label

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
        self.label = None
        body = orjson.dumps({"model_path": str(path), "weight_version": label, "flush_cache": True})
        try:
            try:
                # `retract`, because `in_place` would go on over keys and values that the old weights made.
                await self._control("/pause_generation", {"mode": "retract"})
                url = f"{self.url}/update_weights_from_disk"
                answer = await self.client.post(url, body, timeout_s=LOAD_TIMEOUT_S)
            finally:
                # Shielded: whoever gives up here must not leave a server that is paused for ever.
                await asyncio.shield(self._control("/continue_generation", {}))
        except TransientError:
            raise
        except EngineError as error:
            raise EngineError(f"the weights at {path} were not loaded: {error}") from error
        if not answer.get("success"):
            raise EngineError(f"the weights at {path} were not loaded: {shown(self.url)}: {answer.get('message')}")

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
