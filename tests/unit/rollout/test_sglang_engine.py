import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_policy_server import Answer, FakeSglang, serving
from sglang_samples import REPLY, Start, engine_of, fake_servers, image_request, text_request

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def start(renderer: Renderer) -> Iterator[Start]:
    with fake_servers(renderer) as make:
        yield make


async def test_sampled_tokens_and_log_probabilities_are_returned_unchanged(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake, policy_version=7) as engine:
        result = await engine.generate(text_request(renderer, stop=("</tool_call>",)))
    assert result.token_ids == REPLY
    assert result.logprobs == (-0.5, -0.625, -0.75)
    assert result.text == renderer.decode_response(REPLY)
    assert (result.policy_version, result.policy_versions, result.finish_reason) == (7, (), "stop")
    sampling = fake.requests("/generate")[-1]["sampling_params"]
    assert sampling["temperature"] == 0.7
    assert sampling["top_p"] == 0.9
    assert sampling["stop"] == ["</tool_call>"]
    assert sampling["no_stop_trim"] is True
    assert sampling["skip_special_tokens"] is False


async def test_images_are_sent_as_their_exact_bytes_with_one_placeholder_each(
    renderer: Renderer, start: Start, noise_png: Callable[[int, int, int], bytes]
) -> None:
    fake = start()
    images = [noise_png(64, 96, 1), noise_png(64, 96, 2)]
    request = image_request(renderer, images, (64, 96))
    async with engine_of(renderer, fake) as engine:
        await engine.generate(request)
    sent = fake.requests("/generate")[-1]
    assert [base64.b64decode(image) for image in sent["image_data"]] == images
    assert sent["input_ids"].count(renderer.image_id) == 2
    assert request.token_ids.count(renderer.image_id) == 12


async def test_a_request_with_more_images_than_placeholders_is_never_sent(
    renderer: Renderer, start: Start, noise_png: Callable[[int, int, int], bytes]
) -> None:
    fake = start()
    request = image_request(renderer, [noise_png(64, 64, 1)], (64, 64))
    broken = GenerateRequest(sampling=request.sampling, token_ids=request.token_ids, images=request.images * 2)
    async with engine_of(renderer, fake) as engine:
        with pytest.raises(EngineError, match="1 runs of image placeholders and 2 images"):
            await engine.generate(broken)
    assert fake.requests("/generate") == []


async def test_a_server_that_builds_another_prompt_than_the_one_sent_is_an_error(
    renderer: Renderer, start: Start
) -> None:
    fake = start(adds_tokens=(1,))
    async with engine_of(renderer, fake) as engine:
        with pytest.raises(EngineError, match="built another prompt than the one sent"):
            await engine.generate(text_request(renderer))


async def test_temporary_failures_are_retried_until_a_response_arrives(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake, request_timeout_s=0.4) as engine:
        await engine.health()
        fake.instead["/generate"] = [
            Answer(status=503, headers=(("Retry-After", "0.05"),)),
            Answer(body=b'{"text": "half', is_dropped=True),
            Answer(is_silent=True),
            Answer(body=b'{"output_ids": []}'),
        ]
        result = await engine.generate(text_request(renderer))
    assert result.token_ids == REPLY


async def test_a_refused_request_fails_at_once(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.health()
        before = len(fake.calls)
        fake.instead["/generate"] = [Answer(status=400, body=b'{"error": {"message": "the input is too long"}}')]
        with pytest.raises(EngineError, match="400: the input is too long"):
            await engine.generate(text_request(renderer))
        assert fake.paths()[before:].count("/generate") == 1


async def test_a_request_to_a_server_that_keeps_failing_is_given_up_within_the_retry_budget(
    renderer: Renderer, start: Start
) -> None:
    fake = start()
    fake.instead["/generate"] = [Answer(status=500)] * 100
    async with engine_of(renderer, fake, retry_budget_s=0.5) as engine:
        began = time.monotonic()
        with pytest.raises(EngineError, match="given up after"):
            await engine.generate(text_request(renderer))
        assert time.monotonic() - began < 10


async def test_log_probabilities_that_do_not_belong_to_the_tokens_are_refused(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake, retry_budget_s=0.0) as engine:
        await engine.health()
        whole = fake._truth("/generate", {"sampling_params": {"max_new_tokens": 3, "temperature": 1}, "input_ids": [1]})
        assert whole is not None
        whole["meta_info"]["output_token_logprobs"][1][1] = 99
        fake.instead["/generate"] = [Answer(body=json.dumps(whole).encode())]
        with pytest.raises(EngineError, match="do not belong to the tokens"):
            await engine.generate(text_request(renderer))


async def test_banned_ids_are_removed_from_the_distribution_and_not_filtered_from_its_samples(
    renderer: Renderer, start: Start
) -> None:
    vocab_size = len(renderer.tokenizer) + 8
    banned = [renderer.image_id, renderer.processor.video_token_id, *range(len(renderer.tokenizer), vocab_size)]
    fake = start(reply=(40, renderer.image_id, vocab_size - 1, 41))
    async with engine_of(renderer, fake) as engine:
        result = await engine.generate(text_request(renderer))
    assert result.token_ids == (40, 41)
    sent = fake.requests("/generate")
    assert all(set(body["sampling_params"]["logit_bias"]) == {str(one) for one in banned} for body in sent)
    assert set(sent[-1]["sampling_params"]["logit_bias"].values()) == {-1e9}
    assert not set(banned) & set(sent[-1]["sampling_params"]["stop_token_ids"])


async def test_a_server_that_samples_a_banned_id_is_refused_at_once(renderer: Renderer, start: Start) -> None:
    fake = start(reply=(40, renderer.image_id), ignores_bans=True)
    async with engine_of(renderer, fake) as engine:
        await engine.health()
        before = fake.paths().count("/generate")
        with pytest.raises(EngineError, match=f"banned id {renderer.image_id}: it ignores logit_bias"):
            await engine.generate(text_request(renderer))
    assert fake.paths().count("/generate") == before + 1


async def test_an_episode_stays_with_its_server_and_other_episodes_are_spread_over_the_servers(
    renderer: Renderer, start: Start
) -> None:
    fakes = [start(), start()]
    async with engine_of(renderer, *fakes) as engine:
        await engine.health()
        before = [fake.paths().count("/generate") for fake in fakes]
        for _ in range(6):
            await engine.generate(text_request(renderer, episode_id="one"))
        after = [fake.paths().count("/generate") - count for fake, count in zip(fakes, before, strict=True)]
        assert sorted(after) == [0, 6]
        await engine.forget("one")
        await asyncio.gather(*(engine.generate(text_request(renderer, episode_id=f"e{n}")) for n in range(8)))
        spread = [
            fake.paths().count("/generate") - count - had for fake, count, had in zip(fakes, before, after, strict=True)
        ]
        assert min(spread) >= 1


async def test_a_server_that_dies_is_left_out_and_its_episodes_move(renderer: Renderer, start: Start) -> None:
    alive = start()
    with serving(FakeSglang(reply=(50,), image_id=renderer.image_id)) as dying:
        async with engine_of(renderer, alive, dying) as engine:
            await engine.health()
            results = await asyncio.gather(
                *(engine.generate(text_request(renderer, episode_id=f"e{n}")) for n in range(8))
            )
            assert {result.token_ids for result in results} == {REPLY, (50,)}
            dying.instead["/generate"] = [Answer(is_dropped=True)] * 50
            dying.instead["/model_info"] = [Answer(status=503)] * 50
            again = [await engine.generate(text_request(renderer, episode_id=f"e{n}")) for n in range(8)]
    assert {result.token_ids for result in again} == {REPLY}


async def test_cancelling_a_turn_frees_its_place(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.health()
        await engine.generate(text_request(renderer))
        fake.instead["/generate"] = [Answer(is_silent=True)]
        task = asyncio.create_task(engine.generate(text_request(renderer, episode_id="one")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [server.num_running for server in engine._servers] == [0]
        assert (await engine.generate(text_request(renderer, episode_id="one"))).token_ids == REPLY


async def test_the_token_reaches_the_server(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake, token="secret") as engine:
        await engine.generate(text_request(renderer))
    assert set(fake.tokens) == {"Bearer secret"}


async def test_a_request_to_a_closed_engine_is_an_error(renderer: Renderer, start: Start) -> None:
    async with engine_of(renderer, start()) as engine:
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(text_request(renderer))


def test_an_engine_without_servers_is_an_error_that_names_the_setting(renderer: Renderer) -> None:
    with pytest.raises(EngineError, match=r"engine\.urls"):
        SglangEngine((), renderer=renderer, section=EngineSection(), vocab_size=512)
