"""Engines on fake sglang servers, and requests for them."""

import json
import os
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
def fake_servers(renderer: Renderer, **defaults: Any) -> Iterator[Start]:
    """Starts fake servers that end with the block."""
    with ExitStack() as stack:

        def make(**options: Any) -> FakeSglang:
            options = {"reply": REPLY, "image_id": renderer.image_id, **defaults, **options}
            return stack.enter_context(serving(FakeSglang(**options)))

        yield make


def write_checkpoint(folder: Path, *, tower: int = 0, words: int = 0) -> Path:
    """Writes two tensors: the bias that the check of the vision cache looks for, and one of the language model."""
    folder.mkdir(parents=True)
    names = ("model.visual.merger.linear_fc2.bias", "model.language_model.norm.weight")
    entries = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * index, 16 * (index + 1)]}
        for index, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    values = struct.pack("<8f", *[float(tower)] * 4, *[float(words)] * 4)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    return folder


def write_adapter(folder: Path, base: Path, *, factors: int = 0, alpha: int = 16) -> Path:
    """A checkpoint that is an adapter over `base`."""
    adapter = folder / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "base.json").write_text(json.dumps({"base_folder": os.path.relpath(base, adapter)}))
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": alpha}))
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([factors] * 8))
    return folder


@asynccontextmanager
async def engine_of(renderer: Renderer, *fakes: FakeSglang, **options: Any) -> AsyncIterator[SglangEngine]:
    section = EngineSection(
        kind="sglang",
        urls=tuple(fake.url for fake in fakes),
        request_timeout_s=options.pop("request_timeout_s", 5.0),
        retry_budget_s=options.pop("retry_budget_s", 10.0),
        health_timeout_s=options.pop("health_timeout_s", 5.0),
    )
    vocab_size = len(renderer.tokenizer) + 8
    engine = SglangEngine(section.urls, renderer=renderer, section=section, vocab_size=vocab_size, **options)
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
