"""The engine against a real sglang server: what it reports is what transformers computes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_server import SglangProcess, sglang_process
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import EngineSection, TinyModelSection
from osworld_pipeline.rollout.engines.http_calls import JsonClient
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_checks import vision_cache_problem
from osworld_pipeline.rollout.engines.sglang_server import SglangServer
from osworld_pipeline.training.tiny_model import build_tiny_checkpoint

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1500)]
TOLERANCE = 1e-4
SIZE = (320, 192)
Noise = Callable[[int, int, int], bytes]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of one tokenizer and different weights, the vision tower's too."""
    parent = tmp_path_factory.mktemp("checkpoints")
    folders = (parent / "one", parent / "two")
    torch.set_num_threads(1)
    for seed, folder in enumerate(folders):
        spec = TinyModelSection(
            kind="tiny",
            hidden_size=64,
            num_layers=2,
            vision_hidden_size=48,
            vision_depth=1,
            vocab_size=512,
            seed=seed,
        )
        build_tiny_checkpoint(folder, spec, ["Action: rename the folder\n[Task]\nRename the folder alpha to bravo."])
    return folders


@pytest.fixture(scope="module")
def server(checkpoints: tuple[Path, Path]) -> Iterator[SglangProcess]:
    with sglang_process(checkpoints[0]) as process:
        yield process


@pytest.fixture(scope="module")
def renderer(checkpoints: tuple[Path, Path]) -> Renderer:
    from osworld_pipeline.agent.processor import load_processor

    return Renderer(load_processor(checkpoints[0]))


@pytest.fixture(scope="module")
def models(checkpoints: tuple[Path, Path]) -> dict[int, Any]:
    """By the policy version that the tests load each of them under."""
    return {
        version: Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in enumerate(checkpoints, start=1)
    }


@asynccontextmanager
async def engine_of(url: str, renderer: Renderer, **limits: float) -> AsyncIterator[SglangEngine]:
    section = EngineSection(kind="sglang", urls=(url,), **{"request_timeout_s": 120.0, **limits})
    engine = SglangEngine(section.urls, renderer=renderer, section=section)
    try:
        yield engine
    finally:
        await engine.close()


class Conversation:
    def __init__(self, renderer: Renderer, noise_png: Noise, seed: int) -> None:
        self._renderer = renderer
        self._noise_png = noise_png
        self._seed = seed
        self._ids = renderer.turn(system_message(f"You operate computer {seed}."))
        self._images: list[bytes] = []

    def ask(self, **sampling: Any) -> GenerateRequest:
        self._images.append(self._noise_png(*SIZE, 100 * self._seed + len(self._images)))
        self._ids += self._renderer.turn(user_message("Open the text editor."), [SIZE])
        self._ids += self._renderer.generation_prompt
        defaults = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 12, "stop": (), "seed": self._seed}
        return GenerateRequest(
            sampling=SamplingParams(**{**defaults, **sampling}),
            token_ids=tuple(self._ids),
            images=tuple(self._images),
            episode_id=f"episode-{self._seed}",
        )

    def hear(self, result: GenerateResult) -> None:
        self._ids += result.token_ids
        if result.token_ids[-1] != self._renderer.im_end_id:
            self._ids.append(self._renderer.im_end_id)
        self._ids += self._renderer.newline_ids


def differences(model: Any, renderer: Renderer, request: GenerateRequest, result: GenerateResult) -> Sequence[float]:
    """Of each reported log-probability from a plain forward pass of transformers."""
    sequence = (request.token_ids + result.token_ids, request.images)
    arrays = build_model_inputs(renderer.processor, [sequence])
    with torch.inference_mode():
        logits_TV = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).logits[0]
    logprobs_TV = logits_TV.float().log_softmax(dim=-1)
    first = len(request.token_ids) - 1
    return [
        abs(float(logprobs_TV[first + index, token_id]) - logprob)
        for index, (token_id, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True))
    ]


async def test_log_probabilities_equal_transformers_over_turns_and_weight_updates(
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
) -> None:
    worst: dict[int, float] = {}
    async with engine_of(server.url, renderer) as engine:
        await engine.health()
        # The first again at the end: its images were seen under the other weights meanwhile.
        for version in (1, 2, 1):
            await engine.load_weights(checkpoints[version - 1], policy_version=version)
            conversations = [Conversation(renderer, noise_png, seed) for seed in range(4)]
            for _ in range(3):
                requests = [conversation.ask() for conversation in conversations]
                results = await asyncio.gather(*(engine.generate(request) for request in requests))
                for conversation, request, result in zip(conversations, requests, results, strict=True):
                    assert result.policy_version == version
                    largest = max(differences(models[version], renderer, request, result))
                    worst[version] = max(worst.get(version, 0.0), largest)
                    conversation.hear(result)
    print(f"largest difference from transformers by weights: {worst}")
    assert max(worst.values()) < TOLERANCE


async def test_a_half_done_response_survives_an_update_token_by_token(
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
) -> None:
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        request = Conversation(renderer, noise_png, 50).ask(temperature=0.0, max_new_tokens=500)
        asked = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(1.5)
        await engine.load_weights(checkpoints[1], policy_version=2)
        assert not asked.done(), "the response was over before the update: ask for more tokens"
        result = await asked
    assert result.policy_version == 1
    assert set(result.policy_versions) == {1, 2}
    by_version = {version: differences(models[version], renderer, request, result) for version in (1, 2)}
    own = [by_version[version][index] for index, version in enumerate(result.policy_versions)]
    print(f"{result.policy_versions.count(1)} tokens before the update, {result.policy_versions.count(2)} after it")
    assert max(own) < TOLERANCE
    assert max(by_version[1]) > 100 * TOLERANCE


async def test_a_response_ends_after_its_stop_string_which_stays(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        free = await engine.generate(Conversation(renderer, noise_png, 60).ask(temperature=0.0))
        stop = renderer.decode_response(free.token_ids[:3])
        request = Conversation(renderer, noise_png, 60).ask(temperature=0.0, stop=(stop,))
        stopped = await engine.generate(request)
    assert free.finish_reason == "length"
    assert stopped.finish_reason == "stop"
    assert stopped.text == stop
    assert stopped.token_ids == free.token_ids[:3]


async def test_a_server_killed_in_a_request_is_a_fault_and_its_successor_gets_the_weights(
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
) -> None:
    async with engine_of(server.url, renderer, retry_budget_s=3.0) as engine:
        await engine.load_weights(checkpoints[1], policy_version=2)
        long = Conversation(renderer, noise_png, 70).ask(temperature=0.0, max_new_tokens=2000)
        asked = asyncio.create_task(engine.generate(long))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.kill)
        start = time.monotonic()
        with pytest.raises(EngineError, match="given up after"):
            await asked
        assert time.monotonic() - start < 15
        port = int(server.url.rpartition(":")[2])
        process = sglang_process(checkpoints[0], port=port)
        await asyncio.to_thread(process.__enter__)
        try:
            request = Conversation(renderer, noise_png, 71).ask()
            result = await engine.generate(request)
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)
    assert result.policy_version == 2
    assert max(differences(models[2], renderer, request, result)) < TOLERANCE


async def test_the_traps_of_an_ordinary_server_are_seen(checkpoints: tuple[Path, Path], renderer: Renderer) -> None:
    ordinary = {"SGLANG_VLM_CACHE_SIZE_MB": "100", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    # In a thread: a fixture would hold this server beside the other one.
    process = sglang_process(checkpoints[0], env=ordinary)
    server = await asyncio.to_thread(process.__enter__)
    client = JsonClient()
    try:
        async with engine_of(server.url, renderer) as engine:
            with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
                await engine.health()
        one = SglangServer(url=server.url, client=client)
        problem = await vision_cache_problem(one, renderer, checkpoints[0], timeout_s=60)
        assert problem is not None
        assert "SGLANG_VLM_CACHE_SIZE_MB=0" in problem
    finally:
        await client.close()
        await asyncio.to_thread(process.__exit__, None, None, None)
