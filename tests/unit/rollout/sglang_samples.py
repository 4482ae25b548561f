"""Engines on fake sglang servers, and requests for them."""

import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fake_policy_server import FakeSglang, serving

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine

REPLY = (40, 41, 42)
Start = Callable[..., FakeSglang]


@contextmanager
def fake_servers(renderer: Renderer) -> Iterator[Start]:
    """Starts fake servers that end with the block."""
    with ExitStack() as stack:

        def make(**options: Any) -> FakeSglang:
            options = {"reply": REPLY, "image_id": renderer.image_id, **options}
            return stack.enter_context(serving(FakeSglang(**options)))

        yield make


def write_vision_bias(folder: Path) -> None:
    """A checkpoint of no more than the bias that the check of the vision cache looks for."""
    folder.mkdir(parents=True)
    entry = {"model.visual.merger.linear_fc2.bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    header = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


@asynccontextmanager
async def engine_of(renderer: Renderer, *fakes: FakeSglang, **options: Any) -> AsyncIterator[SglangEngine]:
    section = EngineSection(
        kind="sglang",
        urls=tuple(fake.url for fake in fakes),
        request_timeout_s=options.pop("request_timeout_s", 5.0),
        retry_budget_s=options.pop("retry_budget_s", 10.0),
        health_timeout_s=options.pop("health_timeout_s", 5.0),
    )
    engine = SglangEngine(section.urls, renderer=renderer, section=section, **options)
    try:
        yield engine
    finally:
        await engine.close()


def text_request(renderer: Renderer, *, episode_id: str = "", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        sampling=SamplingParams(**{"temperature": 0.7, "top_p": 0.9, "seed": 5, **sampling}),
        token_ids=(*renderer.encode("Open the editor."), *renderer.generation_prompt),
        episode_id=episode_id,
    )


def image_request(renderer: Renderer, images: list[bytes], size: tuple[int, int]) -> GenerateRequest:
    width, height = size
    ids = [token_id for _ in images for token_id in renderer.image_ids(width=width, height=height)]
    return GenerateRequest(
        sampling=SamplingParams(temperature=0.7, seed=5),
        token_ids=(*ids, *renderer.generation_prompt),
        images=tuple(images),
    )
