"""Turns of many episodes through the in-process engine: what is kept between them, what an update does to responses in
flight, and that a response does not depend on the other episodes."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_samples import Conversation, Noise, engine_model, largest_difference, plain_logprobs

from osworld_pipeline.agent.model_inputs import PixelCache, build_model_inputs, rope_positions
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.transformers import TransformersEngine

Converse = Callable[[str], Conversation]


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    return engine_model(tiny_folder)


@pytest.fixture
def converse(renderer: Renderer, noise_png: Noise) -> Converse:
    return lambda episode_id: Conversation(renderer, noise_png, episode_id)


class CountingCache(PixelCache):
    """Counts the images that are requested."""

    num_asked = 0

    def pixel_values(self, processor: Any, image: bytes) -> tuple[np.ndarray, np.ndarray]:
        self.num_asked += 1
        return super().pixel_values(processor, image)


def count_read_tokens(model: Any) -> list[int]:
    """A list that gets the number of new tokens at each forward pass of the language model."""
    counts: list[int] = []
    model.model.language_model.register_forward_pre_hook(
        lambda _, __, kwargs: counts.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    return counts


def event_after_passes(model: Any, number: int) -> asyncio.Event:
    """An event that is set when the language model starts its `number`-th forward pass from now."""
    event, loop, passes = asyncio.Event(), asyncio.get_running_loop(), itertools.count(1)

    def count(*_: Any) -> None:
        if next(passes) == number:
            loop.call_soon_threadsafe(event.set)

    model.model.language_model.register_forward_pre_hook(count)
    return event


async def play(
    engine: TransformersEngine, conversation: Conversation, *, num_turns: int = 3, delay_s: float = 0.0
) -> list[tuple[GenerateRequest, GenerateResult]]:
    turns = []
    for turn in range(num_turns):
        await asyncio.sleep(delay_s)
        request = conversation.ask(f"turn {turn}", ((64, 96), (96, 64), (32, 32))[turn % 3])
        result = await engine.generate(request)
        conversation.receive(result)
        turns.append((request, result))
    return turns


def test_rope_positions_equal_those_of_the_model(model: Any, processor: Any, converse: Converse) -> None:
    conversation = converse("e")
    for size in ((64, 96), (160, 32), (32, 32)):
        request = conversation.ask("look", size)
    inputs = {
        name: torch.from_numpy(array)
        for name, array in build_model_inputs(processor, [(request.token_ids, request.images)]).items()
    }
    expected, delta = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    ours = rope_positions(processor, request.token_ids, inputs["image_grid_thw"].numpy())
    assert (ours == expected[:, 0].numpy()).all()
    assert ours.max() + 1 - ours.shape[1] == int(delta)


async def test_a_turn_reads_only_its_new_tokens_and_encodes_only_its_new_image(
    model: Any, processor: Any, converse: Converse
) -> None:
    counts, cache = count_read_tokens(model), CountingCache()
    engine = TransformersEngine(model, processor, cache=cache)
    turns = await play(engine, converse("e"))
    await engine.close()
    prompts = [count for count in counts if count > 1]
    # The newest sampled token was never read, so the next turn reads it.
    kept = [0, *(len(request.token_ids) + len(result.token_ids) - 1 for request, result in turns)]
    assert prompts == [len(request.token_ids) - kept[index] for index, (request, _) in enumerate(turns)]
    assert cache.num_asked == len(turns)
    for request, result in turns:
        assert largest_difference(model, processor, request, result) < 1e-4


async def test_turns_with_and_without_reuse_have_the_same_responses(
    model: Any, processor: Any, converse: Converse
) -> None:
    said = []
    for reuse in (True, False):
        engine = TransformersEngine(model, processor, reuse_kv_cache=reuse)
        said.append([result for _, result in await play(engine, converse("e"))])
        assert (engine.num_kept_bytes > 0) == reuse
        await engine.close()
    for kept, plain in zip(*said, strict=True):
        assert kept.token_ids == plain.token_ids
        assert kept.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


async def test_an_episode_has_the_same_responses_among_others_and_alone(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor, max_batch=6)
    names = [f"episode {index}" for index in range(8)]
    together = await asyncio.gather(
        *[play(engine, converse(name), delay_s=0.003 * index) for index, name in enumerate(names)]
    )
    alone = [await play(engine, converse(name)) for name in names[:3]]
    await engine.close()
    for one, among in zip(alone, together, strict=False):
        for (_, first), (_, second) in zip(one, among, strict=True):
            assert first.token_ids == second.token_ids
            assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


async def test_a_prompt_that_does_not_extend_the_kept_one_is_read_in_full(
    model: Any, processor: Any, converse: Converse, noise_png: Noise
) -> None:
    engine = TransformersEngine(model, processor)
    conversation = converse("e")
    conversation.receive(await engine.generate(conversation.ask("one")))
    second = conversation.ask("two")
    other_image = replace(second, images=(noise_png(64, 96, 99), second.images[1]))
    other_token = replace(second, token_ids=(second.token_ids[0], second.token_ids[1] + 1, *second.token_ids[2:]))
    shorter = replace(second, token_ids=second.token_ids[:20], images=())
    for request in (other_image, other_token, shorter, second):
        assert largest_difference(model, processor, request, await engine.generate(request)) < 1e-4
    await engine.close()


async def test_a_repeated_request_gets_the_same_response(model: Any, processor: Any, converse: Converse) -> None:
    engine = TransformersEngine(model, processor)
    conversation = converse("e")
    conversation.receive(await engine.generate(conversation.ask("one")))
    request = conversation.ask("two")
    first, second = await engine.generate(request), await engine.generate(request)
    await engine.close()
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


async def test_kept_keys_and_values_stay_within_their_budget_and_the_least_recently_used_go_first(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor)
    first = converse("aaa")
    first.receive(await engine.generate(first.ask("one")))
    one_episode = engine.num_kept_bytes
    await engine.close()

    counts = count_read_tokens(model)
    engine = TransformersEngine(model, processor, kv_cache_bytes=int(one_episode * 2.5))
    conversations = {name: converse(name) for name in ("aaa", "bbb", "ccc")}
    for name in ("aaa", "bbb", "ccc"):
        conversations[name].receive(await engine.generate(conversations[name].ask("one", max_new_tokens=4)))
        assert engine.num_kept_bytes <= one_episode * 2.5
    counts.clear()
    for name, is_kept in (("aaa", False), ("ccc", True)):
        request = conversations[name].ask("two", max_new_tokens=1)
        result = await engine.generate(request)
        assert (counts.pop() < len(request.token_ids)) == is_kept, name
        assert largest_difference(model, processor, request, result) < 1e-4
    await engine.close()
    assert engine.num_kept_bytes == 0


async def test_a_forgotten_episode_takes_no_memory(model: Any, processor: Any, converse: Converse) -> None:
    engine = TransformersEngine(model, processor)
    await engine.generate(converse("e").ask("one"))
    nameless = replace(converse("f").ask("one"), episode_id="")
    kept = engine.num_kept_bytes
    await engine.generate(nameless)
    assert engine.num_kept_bytes == kept > 0
    await engine.forget("e")
    await engine.forget("never received of")
    assert engine.num_kept_bytes == 0
    await engine.close()


async def test_nothing_that_old_weights_computed_is_used_after_an_update(
    tiny_folder: Path, model: Any, processor: Any, converse: Converse
) -> None:
    other = engine_model(tiny_folder, scale=3.0)
    engine = TransformersEngine(model, processor)
    by_state, by_trainer = converse("state"), converse("trainer")
    for conversation in (by_state, by_trainer):
        conversation.receive(await engine.generate(conversation.ask("one")))
    await engine.load_state(other.state_dict(), policy_version=1)
    assert (engine.policy_version, engine.num_kept_bytes) == (1, 0)
    request = by_state.ask("two")
    result = await engine.generate(request)
    assert largest_difference(other, processor, request, result) < 1e-4

    with torch.no_grad():
        for mine, its in zip(model.parameters(), engine_model(tiny_folder, scale=5.0).parameters(), strict=True):
            mine.copy_(its)
    engine.mark_updated(policy_version=2)
    assert engine.policy_version == 2
    request = by_trainer.ask("two")
    result = await engine.generate(request)
    assert result.policy_version == 2
    assert largest_difference(model, processor, request, result) < 1e-4
    await engine.close()


async def test_a_response_in_flight_survives_an_update_and_says_which_weights_sampled_each_token(
    tiny_folder: Path, model: Any, processor: Any, converse: Converse
) -> None:
    before, after = engine_model(tiny_folder), engine_model(tiny_folder, scale=3.0)
    engine = TransformersEngine(model, processor, policy_version=7)
    first, second = converse("first"), converse("second")
    # The first episode has kept keys and values when it is interrupted: its early image must be encoded again.
    first.receive(await engine.generate(first.ask("one")))
    # Greedy sampling: this model then repeats itself instead of ending its turn early.
    endless = {"temperature": 0.0, "max_new_tokens": 150}
    requests = [first.ask("two", **endless), second.ask("one", **endless)]
    has_begun = event_after_passes(model, 20)
    waiting = [asyncio.create_task(engine.generate(request)) for request in requests]
    await has_begun.wait()
    await engine.load_state(after.state_dict(), policy_version=8)
    results = await asyncio.gather(*waiting)
    await engine.close()
    for request, result in zip(requests, results, strict=True):
        assert result.policy_version == 7
        assert set(result.policy_versions) == {7, 8}
        num_old = result.policy_versions.count(7)
        assert result.policy_versions == (7,) * num_old + (8,) * (len(result.token_ids) - num_old)
        old = plain_logprobs(before, processor, request, result)[:num_old]
        new = plain_logprobs(after, processor, request, result)[num_old:]
        assert result.logprobs == pytest.approx([*old, *new], abs=1e-4)


async def test_a_state_that_does_not_fit_the_model_is_refused_and_changes_nothing(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor)
    request = converse("e").ask("one")
    before = await engine.generate(request)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    name = "model.language_model.norm.weight"
    with pytest.raises(EngineError, match=f"{name} is missing"):
        await engine.load_state({key: value for key, value in state.items() if key != name}, policy_version=1)
    with pytest.raises(EngineError, match=f"{name} has the shape .* there, and .* in the model"):
        await engine.load_state({**state, name: torch.zeros(3)}, policy_version=1)
    with pytest.raises(EngineError, match="the model has no surplus"):
        await engine.load_state({**state, "surplus": torch.zeros(3)}, policy_version=1)
    assert await engine.generate(request) == before
    assert engine.policy_version == 0
    await engine.close()


async def test_a_cancelled_request_leaves_the_batch_and_the_others_are_answered(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor, max_batch=3)
    passes, has_begun = count_read_tokens(model), event_after_passes(model, 10)
    names = ("a", "b", "c", "d", "e")
    tasks = [
        asyncio.create_task(engine.generate(converse(name).ask("one", max_new_tokens=60, temperature=1.0)))
        for name in names
    ]
    await has_begun.wait()
    tasks[0].cancel()
    tasks[4].cancel()  # this request waits for a place in the batch
    with suppress(asyncio.CancelledError):
        await tasks[0]
    for name, task in list(zip(names, tasks, strict=True))[1:4]:
        result = await task
        request = converse(name).ask("one", max_new_tokens=60, temperature=1.0)
        assert largest_difference(model, processor, request, result) < 1e-4
    num_passes = len(passes)
    await asyncio.sleep(0.05)
    assert len(passes) == num_passes
    await engine.close()


async def test_an_invalid_request_gets_its_own_error_and_the_others_are_answered(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor)
    good = converse("good").ask("one")
    wrong = {
        "malformed": replace(good, images=(b"no image",)),
        "no tokens": replace(good, token_ids=(), images=()),
        "outside the vocabulary": replace(good, token_ids=(10**6,), images=()),
        "placeholders where": replace(good, images=(converse("x").ask("x", (128, 128)).images[0],)),
    }
    results = await asyncio.gather(
        engine.generate(good), *[engine.generate(request) for request in wrong.values()], return_exceptions=True
    )
    assert isinstance(results[0], GenerateResult)
    for expected, error in zip(wrong, results[1:], strict=True):
        assert isinstance(error, EngineError)
        assert expected in str(error)
    await engine.close()


async def test_a_prompt_that_fails_in_the_model_fails_alone(model: Any, processor: Any, converse: Converse) -> None:
    good, bad = converse("good").ask("one", max_new_tokens=30), converse("bad").ask("one")

    def refuse(_: Any, __: Any, kwargs: Any) -> None:
        if kwargs["inputs_embeds"].shape[1] == len(bad.token_ids):
            raise RuntimeError("out of luck\nand more")

    bad = replace(bad, token_ids=(*bad.token_ids, *[5] * 20))
    model.model.language_model.register_forward_pre_hook(refuse, with_kwargs=True)
    engine = TransformersEngine(model, processor)
    results = await asyncio.gather(engine.generate(good), engine.generate(bad), return_exceptions=True)
    assert isinstance(results[0], GenerateResult)
    assert isinstance(results[1], EngineError)
    assert str(results[1]) == "generation failed: out of luck"
    await engine.health()
    await engine.close()


async def test_closing_the_engine_fails_waiting_requests_with_an_error(
    model: Any, processor: Any, converse: Converse
) -> None:
    engine = TransformersEngine(model, processor, max_batch=1)
    tasks = [
        # Greedy tokens of this model repeat without end; a sampled token may end the turn before the close.
        asyncio.create_task(engine.generate(converse(name).ask("one", max_new_tokens=10_000, temperature=0.0)))
        for name in ("a", "b")
    ]
    await asyncio.sleep(0.05)
    await engine.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "closed" in str(result)
    for call in (engine.health, lambda: engine.load_state({}, policy_version=1)):
        with pytest.raises(EngineError, match="is closed"):
            await call()
