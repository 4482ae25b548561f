"""The ids of turns equal the chat template's for any screen; model inputs agree, or an error says where they do not."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from osworld_pipeline.agent.context import AppendContext
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.model_inputs import PixelCache, build_model_inputs
from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.errors import StoreError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult

Noise = Callable[[int, int, int], bytes]
CALL = 'Action: go\n<tool_call>{"name":"computer_use","arguments":{"action":"wait"}}</tool_call>'
PROMPT = "You operate a computer."
TASK = "[Task]\nRename the folder é to 42.\n"
MESSAGES = [
    system_message(PROMPT),
    user_message(TASK),
    assistant_message(CALL),
    user_message(""),
    assistant_message("Action: stop"),
]


@pytest.fixture
def images(noise_png: Noise) -> list[bytes]:
    return [noise_png(96, 64, 1), noise_png(64, 128, 2)]


def template_inputs(processor: Any, messages: list[dict[str, Any]], images: list[bytes], **options: Any) -> Any:
    """What transformers itself makes of the conversation."""
    pictures = iter([Image.open(io.BytesIO(image)) for image in images])
    filled = [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": next(pictures)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    return processor.apply_chat_template(filled, tokenize=True, return_dict=True, return_tensors="np", **options)


def test_a_rendered_conversation_equals_the_chat_template(processor: Any, images: list[bytes]) -> None:
    rendered = render_demonstration(Renderer(processor), MESSAGES, images)
    ours = build_model_inputs(processor, [(rendered.token_ids, rendered.images)])
    reference = template_inputs(processor, MESSAGES, images)
    assert set(ours) == set(reference)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, reference[name], err_msg=name)


def test_the_mask_covers_the_assistants_words_and_the_end_of_its_turns(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    rendered = render_demonstration(renderer, MESSAGES, images)
    masked = [token for token, flag in zip(rendered.token_ids, rendered.mask, strict=True) if flag]
    assert processor.tokenizer.decode(masked) == f"{CALL}<|im_end|>Action: stop<|im_end|>"


def context_of(renderer: Renderer, *, max_tokens: int = 1000, max_new_tokens: int = 100) -> AppendContext:
    return AppendContext(renderer, PROMPT, max_tokens=max_tokens, max_new_tokens=max_new_tokens)


def observe(context: AppendContext, text: str, image: bytes) -> int | None:
    return context.add_observation(text, prepare_screenshot(image, 1_000_000))


def request_of(context: AppendContext) -> GenerateRequest:
    return context.request(SamplingParams(temperature=1.0), episode_id="e")


def only_sequence(context: AppendContext) -> TokenSequence:
    (sequence,) = context.sequences
    return sequence


def response_of(token_ids: Sequence[int], logprobs: Sequence[float], *, policy_version: int = 0) -> GenerateResult:
    return GenerateResult(
        text="", policy_version=policy_version, finish_reason="stop", token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
    )  # fmt: skip


def test_an_episode_and_its_demonstration_have_the_same_ids(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    context = context_of(renderer)
    assert observe(context, TASK, images[0]) is None
    first_prompt = request_of(context).token_ids
    reference = template_inputs(processor, MESSAGES[:2], images[:1], add_generation_prompt=True)
    assert first_prompt == tuple(reference["input_ids"][0])
    # Sampling stopped at </tool_call>: the turn is closed by us, outside the mask.
    response = renderer.encode(CALL)
    context.add_response(response_of(response, [-0.5] * len(response), policy_version=4))
    assert observe(context, "", images[1]) is None
    # Here the sampler emitted the end of the turn itself.
    last = [*renderer.encode("Action: stop"), renderer.im_end_id]
    context.add_response(response_of(last, [-0.25] * len(last), policy_version=5))
    rendered = render_demonstration(renderer, MESSAGES, images)
    sequence = only_sequence(context)
    assert sequence.token_ids + tuple(renderer.newline_ids) == rendered.token_ids
    assert request_of(context).images == rendered.images
    assert sequence.image_steps == (0, 1)
    assert sum(sequence.response_mask) == len(response) + len(last) == sum(rendered.mask) - 1
    logprobs, versions = np.array(sequence.sampled_logprobs), np.array(sequence.policy_versions)
    assert set(logprobs[np.array(sequence.response_mask) == 1]) == {-0.5, -0.25}
    assert set(logprobs[np.array(sequence.response_mask) == 0]) == {0.0}
    assert set(versions[np.array(sequence.response_mask) == 0]) == {-1}
    assert set(versions[logprobs == -0.5]) == {4}
    assert set(versions[logprobs == -0.25]) == {5}


def test_a_sampled_start_token_of_an_image_is_not_an_image(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    context = context_of(renderer)
    observe(context, TASK, images[0])
    context.add_response(response_of([renderer.vision_start_id], [-1.0]))
    assert only_sequence(context).image_steps == (0,)


def test_an_observation_that_leaves_no_room_for_a_response_adds_nothing_and_returns_the_excess(
    processor: Any, images: list[bytes]
) -> None:
    renderer = Renderer(processor)
    roomy = context_of(renderer)
    observe(roomy, TASK, images[0])
    needed = roomy.num_prompt_tokens + 100
    exact = context_of(renderer, max_tokens=needed)
    assert observe(exact, TASK, images[0]) is None
    tight = context_of(renderer, max_tokens=needed - 3)
    before = request_of(tight)
    assert observe(tight, TASK, images[0]) == 3
    assert request_of(tight) == before
    assert tight.sequences == ()


def test_special_tokens_on_a_screen_are_only_characters(processor: Any) -> None:
    renderer = Renderer(processor)
    ids = renderer.turn(user_message("a <|im_end|> b <|image_pad|> <|vision_start|>"), [(32, 32)])
    assert ids.count(renderer.image_id) == 1
    assert ids.count(renderer.im_end_id) == 1
    assert ids.count(renderer.vision_start_id) == 1
    text = renderer.encode("a <|im_end|> b <|image_pad|> <|vision_start|>")
    assert ids[-2 - len(text) : -2] == text
    assert renderer.tokenizer.decode(text) == "a <|im_end|> b <|image_pad|> <|vision_start|>"


def test_a_demonstration_is_cut_after_the_last_turn_that_fits(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    whole = render_demonstration(renderer, MESSAGES, images)
    first = render_demonstration(renderer, MESSAGES[:3], images[:1])
    cut = render_demonstration(renderer, MESSAGES, images, max_tokens=len(whole.token_ids) - 1)
    assert cut == first
    assert (cut.num_assistant_turns, whole.num_assistant_turns) == (1, 2)
    with pytest.raises(ValueError, match="no assistant turn of the conversation ends within 10 tokens"):
        render_demonstration(renderer, MESSAGES, images, max_tokens=10)


def test_too_few_and_too_many_images_are_refused(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    with pytest.raises(ValueError, match="more image placeholders than images"):
        render_demonstration(renderer, MESSAGES, images[:1])
    with pytest.raises(ValueError, match="2 image placeholders and 3 images"):
        render_demonstration(renderer, MESSAGES, [*images, images[0]])


def test_a_response_with_an_image_placeholder_is_refused(processor: Any, images: list[bytes]) -> None:
    renderer = Renderer(processor)
    context = context_of(renderer)
    assert observe(context, TASK, images[0]) is None
    before = request_of(context)
    with pytest.raises(ValueError, match="image placeholder"):
        context.add_response(response_of([renderer.image_id], [0.0]))
    with pytest.raises(ValueError, match="1 tokens and 2 log-probabilities"):
        context.add_response(response_of([5], [0.0, 0.0]))
    assert request_of(context) == before
    assert context.sequences == ()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_padded_on_the_side_asked_for(processor: Any, images: list[bytes], side: Any) -> None:
    rendered = render_demonstration(Renderer(processor), MESSAGES, images)
    short = (1, 2, 3)
    inputs = build_model_inputs(processor, [(short, ()), (rendered.token_ids, rendered.images)], padding_side=side)
    length = len(rendered.token_ids)
    assert inputs["input_ids"].shape == (2, length)
    span = slice(length - 3, None) if side == "left" else slice(0, 3)
    assert tuple(inputs["input_ids"][0, span]) == short
    assert inputs["attention_mask"].sum(axis=1).tolist() == [3, length]
    assert inputs["mm_token_type_ids"][0].sum() == 0
    # 96x64 is 3 * 2 tokens of 4 patches, 64x128 is 2 * 4.
    assert inputs["mm_token_type_ids"][1].sum() == 14
    assert inputs["pixel_values"].shape[0] == 4 * 14
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 4]]


def test_text_alone_has_no_pixel_arrays(processor: Any) -> None:
    assert set(build_model_inputs(processor, [((1, 2), ())])) == {"input_ids", "attention_mask", "mm_token_type_ids"}


def test_placeholders_and_images_that_disagree_name_the_sequence(processor: Any, images: list[bytes]) -> None:
    rendered = render_demonstration(Renderer(processor), MESSAGES, images)
    good = (rendered.token_ids, rendered.images)
    with pytest.raises(ValueError, match="sequence 1 has 2 runs of image placeholders and 1 images"):
        build_model_inputs(processor, [good, (rendered.token_ids, images[:1])])
    with pytest.raises(ValueError, match="sequence 0: image 0 has 6 placeholders where its pixels make 8 tokens"):
        build_model_inputs(processor, [(rendered.token_ids, images[::-1])])
    with pytest.raises(ValueError, match="video placeholder"):
        build_model_inputs(processor, [((processor.video_token_id,), ())])
    with pytest.raises(ValueError, match="sequence 0 has no tokens"):
        build_model_inputs(processor, [((), ())])


def test_the_cache_gives_equal_pixels_and_drops_the_oldest(processor: Any, noise_png: Noise) -> None:
    pictures = [noise_png(64, 64, seed) for seed in range(3)]
    one_image_bytes = 16 * 1536 * 4
    cache = PixelCache(max_bytes=2 * one_image_bytes)
    first = cache.pixel_values(processor, pictures[0])
    assert cache.pixel_values(processor, pictures[0])[0] is first[0]
    cache.pixel_values(processor, pictures[1])
    cache.pixel_values(processor, pictures[2])
    again = cache.pixel_values(processor, pictures[0])
    assert again[0] is not first[0]
    np.testing.assert_array_equal(again[0], first[0])


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no checkpoint folder at "):
        load_processor(tmp_path / "missing")
    with pytest.raises(StoreError, match="holds no usable processor"):
        load_processor(tmp_path)
