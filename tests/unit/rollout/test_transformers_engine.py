"""The in-process engine on a tiny random model: its log-probabilities are those a trainer recomputes, alone and in a
batch of unequal lengths with images."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_samples import Noise, engine_model, largest_difference
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.rollout.engines.transformers_choice import StopCheck, choose_tokens

MakeRequest = Callable[..., GenerateRequest]


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    return engine_model(tiny_folder)


@pytest.fixture
async def engine(model: Any, processor: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(model, processor, timeout_s=30, policy_version=5)
    yield engine
    await engine.close()


@pytest.fixture
def make_request(renderer: Renderer, noise_png: Noise) -> MakeRequest:
    def make(text: str, sizes: list[tuple[int, int]], **sampling: Any) -> GenerateRequest:
        ids = renderer.turn(system_message("You operate a computer."))
        for size in sizes:
            ids += renderer.turn(user_message(text), [size])
        options = {"temperature": 1.0, "max_new_tokens": 12, "seed": 1, "stop": (), **sampling}
        return GenerateRequest(
            token_ids=(*ids, *renderer.encode(text), *renderer.generation_prompt),
            images=tuple(noise_png(*size, index) for index, size in enumerate(sizes)),
            sampling=SamplingParams(**options),
        )

    return make


async def test_logprobs_of_an_unequal_batch_with_images_match_a_trainers_forward(
    model: Any, processor: Any, engine: TransformersEngine, make_request: MakeRequest
) -> None:
    requests = [
        make_request("hello", [(96, 64)], seed=1),
        make_request("a longer text than that", [(64, 128), (96, 96)], seed=2, top_p=0.9, temperature=0.7),
        make_request("no image at all", [], seed=3),
        make_request("three", [(32, 32)] * 3, temperature=0.0),
    ]
    results = await asyncio.gather(*[engine.generate(request) for request in requests])
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == len(result.logprobs) > 0
        assert largest_difference(model, processor, request, result) < 1e-4
        assert result.policy_version == 5


async def test_a_response_depends_on_its_seed_and_not_on_its_neighbours(
    engine: TransformersEngine, make_request: MakeRequest
) -> None:
    request = make_request("hello", [(96, 64)], seed=1)
    others = [make_request("something else", [(64, 64)] * 2, seed=seed) for seed in range(2, 5)]
    batch = await asyncio.gather(*[engine.generate(each) for each in [request, *others]])
    alone = await engine.generate(request)
    assert alone.token_ids == batch[0].token_ids
    assert len({result.token_ids for result in batch}) == 4


async def test_temperature_zero_takes_the_likeliest_allowed_token(
    model: Any, processor: Any, engine: TransformersEngine, make_request: MakeRequest
) -> None:
    request = make_request("hello", [(96, 64)], temperature=0.0, max_new_tokens=1)
    result = await engine.generate(request)
    inputs = build_model_inputs(processor, [(request.token_ids, request.images)])
    with torch.no_grad():
        logits_V = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits[0, -1]
    logits_V[len(processor.tokenizer) :] = -torch.inf
    logits_V[[processor.image_token_id, processor.video_token_id]] = -torch.inf
    assert result.token_ids == (int(logits_V.argmax()),)


async def test_a_placeholder_is_never_sampled_however_likely(
    model: Any, processor: Any, engine: TransformersEngine, make_request: MakeRequest
) -> None:
    # Tied embeddings: a row that is a multiple of the others' mean direction wins every argmax.
    with torch.no_grad():
        hidden = model.model.language_model.norm.weight
        model.lm_head.weight[processor.image_token_id] = 100 * hidden
        model.lm_head.weight[processor.video_token_id] = -100 * hidden
    results = [await engine.generate(make_request("x", [], seed=seed, temperature=2.0)) for seed in range(3)]
    banned = {processor.image_token_id, processor.video_token_id}
    assert not any(banned & set(result.token_ids) for result in results)


async def test_generation_ends_at_the_stop_string_and_keeps_it(
    engine: TransformersEngine, make_request: MakeRequest, renderer: Renderer
) -> None:
    free = await engine.generate(make_request("hello", [], max_new_tokens=12, seed=4))
    assert free.finish_reason == "length"
    stop = renderer.tokenizer.decode(free.token_ids[4:6])
    stopped = await engine.generate(make_request("hello", [], max_new_tokens=12, seed=4, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) <= 6
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.text.endswith(stop)


async def test_the_end_of_turn_token_ends_generation_and_is_kept_as_an_id(
    model: Any, engine: TransformersEngine, make_request: MakeRequest, renderer: Renderer
) -> None:
    request = make_request("hello", [], temperature=0.0)
    first = (await engine.generate(request)).token_ids[0]
    with torch.no_grad():
        model.lm_head.weight[renderer.im_end_id] = 2 * model.lm_head.weight[first]
    result = await engine.generate(request)
    assert result.token_ids == (renderer.im_end_id,)
    assert (result.text, result.finish_reason) == ("", "stop")


async def test_a_malformed_request_fails_alone(
    engine: TransformersEngine, make_request: MakeRequest, renderer: Renderer
) -> None:
    good = make_request("hello", [(64, 64)])
    bad = GenerateRequest(token_ids=good.token_ids, images=(), sampling=good.sampling)
    results = await asyncio.gather(engine.generate(good), engine.generate(bad), return_exceptions=True)
    assert isinstance(results[0], GenerateResult)
    assert isinstance(results[1], EngineError)
    assert "the request is malformed" in str(results[1])


async def test_a_response_that_takes_too_long_is_an_engine_error(
    model: Any, processor: Any, make_request: MakeRequest
) -> None:
    engine = TransformersEngine(model, processor, timeout_s=0.05)
    with pytest.raises(EngineError, match=r"no response within 0.05 s"):
        await engine.generate(make_request("hello", [(128, 128)] * 3, max_new_tokens=300))
    await engine.close()


async def test_responses_after_a_load_have_the_version_of_the_loaded_weights(
    tiny_folder: Path, processor: Any, engine: TransformersEngine, make_request: MakeRequest, model: Any
) -> None:
    request = make_request("hello", [(64, 64)], seed=9)
    before = await engine.generate(request)
    await engine.load_weights(tiny_folder, policy_version=6)
    after = await engine.generate(request)
    assert (before.policy_version, after.policy_version, engine.policy_version) == (5, 6, 6)
    assert after.logprobs != before.logprobs
    assert largest_difference(model, processor, request, after) < 1e-4
    original = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder).eval()
    assert largest_difference(original, processor, request, after) < 1e-4


async def test_missing_weights_are_an_error_that_names_their_folder(engine: TransformersEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot load the weights at"):
        await engine.load_weights(tmp_path, policy_version=6)
    assert engine.policy_version == 5


async def test_a_closed_engine_refuses_requests(model: Any, processor: Any, make_request: MakeRequest) -> None:
    engine = TransformersEngine(model, processor)
    await engine.close()
    with pytest.raises(EngineError, match="is closed"):
        await engine.generate(make_request("hello", []))


async def test_generation_leaves_the_model_in_the_mode_it_was_in(
    model: Any, engine: TransformersEngine, make_request: MakeRequest
) -> None:
    model.train()
    await engine.generate(make_request("hello", [], max_new_tokens=1))
    assert model.training


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits_V = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))

    def chosen(top_p: float) -> list[int]:
        chances = [0.0, 0.15, 0.3, 0.45, 0.6, 0.67, 0.75, 0.9, 0.99]
        samplings = [SamplingParams(temperature=1.0, top_p=top_p)] * len(chances)
        ids, _ = choose_tokens(logits_V.expand(len(chances), -1), samplings, chances, torch.zeros(4, dtype=torch.bool))
        return sorted(set(ids))

    assert chosen(0.4) == [1]
    assert chosen(0.7) == [1, 3]
    assert chosen(0.9) == [0, 1, 3]
    assert chosen(1.0) == [0, 1, 2, 3]


def test_evenly_spread_chances_choose_each_token_as_often_as_its_probability_says() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, 9.0])
    chances = [(index + 0.5) / 1000 for index in range(1000)]
    banned_V = torch.tensor([False, False, False, True])
    samplings = [SamplingParams(temperature=0.5)] * 1000
    ids, logprobs = choose_tokens(logits_V.expand(1000, -1), samplings, chances, banned_V)
    expected = torch.softmax(logits_V[:3] / 0.5, dim=-1)
    assert [ids.count(token) / 1000 for token in range(4)] == pytest.approx([*expected.tolist(), 0.0], abs=2e-3)
    assert logprobs[0] == pytest.approx(float(torch.log(expected)[ids[0]]))


def test_the_highest_chance_never_chooses_a_banned_or_impossible_token() -> None:
    logits_1V = torch.tensor([[1.0, 2.0, -torch.inf, 5.0]])
    banned_V = torch.tensor([False, False, False, True])
    highest = 1 - 2**-24
    ids, _ = choose_tokens(logits_1V, [SamplingParams(temperature=1.0)], [highest], banned_V)
    assert ids == [1]


def test_a_stop_string_is_found_even_if_it_is_split_across_tokens(renderer: Renderer) -> None:
    check = StopCheck(renderer)
    for stop in ("</tool_call>", "\nuser", "schön", "end."):
        ids = renderer.encode(f"some text {stop}")
        found = [check.is_complete(ids[: length + 1], (stop, "never this")) for length in range(len(ids))]
        assert found == [False] * (len(ids) - 1) + [True]


async def test_generation_restores_the_number_of_torch_threads(
    engine: TransformersEngine, make_request: MakeRequest
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        await engine.generate(make_request("hello", [], max_new_tokens=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
