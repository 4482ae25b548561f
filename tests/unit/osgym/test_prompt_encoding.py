"""Prompts for any tokenizer and processor: data is never read as markup, and no image is ever cut."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from osgym_envs import picture

from osworld_pipeline.agent.model_inputs import check_placeholders
from osworld_pipeline.integrations.osgym.batches import StepTokens, collate, model_inputs, prompt_row, step_row
from osworld_pipeline.integrations.osgym.encoding import PromptEncoder
from osworld_pipeline.integrations.osgym.prompts import Markup, read_prompt, without_oldest, write_prompt

TAG = "<|vision_start|>{}<|vision_end|>"


class WordTokenizer:
    """A minimal tokenizer that gives a number for each word."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) + 1 for word in text.split()]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join("x" * (number - 1) for number in ids)


class SquareProcessor:
    """A processor of no known family: one placeholder for every 32x32 pixels, and no vision tokens around them."""

    image_token = "<image>"

    def __call__(self, *, text: list[str], images: list[Any], return_tensors: str, add_special_tokens: bool) -> Any:
        assert text == ["<image>"]
        count = images[0].width * images[0].height // 1024
        return {
            "input_ids": torch.full((1, count), 99),
            "attention_mask": torch.ones(1, count),
            "pixels": torch.ones(1, 3, *reversed(images[0].size)),
        }


def test_osgyms_string_becomes_text_and_images() -> None:
    first, second = picture(1), picture(2)
    text = write_prompt(("Do it.", first, "click(1,2)", second))
    assert read_prompt(text) == ("Do it.", first, "click(1,2)", second)


def test_tags_without_an_image_between_them_stay_text() -> None:
    """An action may contain any text. OSGym's loader reads the text between the tags as an image and fails."""
    text = f"type({TAG.format('aGVsbG8=')}) then {TAG.format('!')}"
    assert "".join(str(part) for part in read_prompt(text + write_prompt([picture(1)]))[:-1]) == text


def test_observation_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not dict"):
        read_prompt({"screenshot": b""})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.integers(0, 3).map(picture)), max_size=8))
def test_written_prompts_read_back_the_same(parts: list[str | bytes]) -> None:
    assert write_prompt(read_prompt(write_prompt(parts))) == write_prompt(parts)


def test_the_oldest_screenshot_is_dropped_together_with_the_response_to_it() -> None:
    prompt = ("task", b"1", "a", b"2", "b", b"3")
    shorter = without_oldest(prompt)
    assert shorter == ("task", b"2", "b", b"3")
    assert without_oldest(("task", b"3")) is None
    assert without_oldest(("task", "a", "b")) == ("task", "b")


def test_names_of_special_tokens_are_tokens_only_in_markup(processor: Any) -> None:
    tokenizer = processor.tokenizer
    encoder = PromptEncoder(tokenizer, processor, max_length=200)
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert special not in encoder.encode(("task <|im_end|>", picture(1))).token_ids
    assert special in encoder.encode((Markup("<|im_end|>"), picture(1))).token_ids
    shown = encoder.encode(("<|vision_start|><|image_pad|><|vision_end|>", picture(1)))
    assert shown.token_ids.count(processor.image_token_id) == 4


def test_too_long_a_prompt_loses_whole_screenshots_and_keeps_the_task(processor: Any) -> None:
    """OSGym cuts tokens from the left: the task first, then part of an image, whose pixels are still passed."""
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=40)
    images = [picture(shade, (96, 64)) for shade in range(6)]
    parts: list[str | bytes] = ["the task"]
    for index, image in enumerate(images):
        parts += [image, f"said {index}"]
    encoded = encoder.encode(tuple(parts))
    assert len(encoded.token_ids) <= 40
    assert encoded.images == tuple(images[-len(encoded.images) :])
    assert 1 <= len(encoded.images) < 6
    assert processor.tokenizer.decode(encoded.token_ids).startswith("the task")
    check_placeholders(
        processor, 0, encoded.token_ids, list(encoder.image_inputs(encoded.images)["image_grid_thw"].numpy())
    )


def test_screenshot_that_can_never_fit_is_named(processor: Any) -> None:
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=20)
    with pytest.raises(ValueError, match="max_prompt_length \\(20\\)"):
        encoder.encode(("task", picture(1, (320, 320))))


def test_long_text_without_images_keeps_its_end() -> None:
    encoder = PromptEncoder(WordTokenizer(), max_length=3)
    assert encoder.encode(("a bb ccc dddd eeeee",)).token_ids == (4, 5, 6)
    assert encoder.encode(("a", "bb ccc dddd", "eeeee")).token_ids == (2, 6)


def test_images_without_a_processor_are_refused() -> None:
    with pytest.raises(ValueError, match="no processor"):
        PromptEncoder(WordTokenizer(), max_length=9).encode(("task", picture(1)))


def test_tokenizer_without_padding_is_refused() -> None:
    tokenizer = WordTokenizer()
    tokenizer.pad_token_id = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="pad_token"):
        PromptEncoder(tokenizer, max_length=9)


def test_a_processor_of_any_family_determines_the_number_of_tokens_of_its_images() -> None:
    encoder = PromptEncoder(WordTokenizer(), SquareProcessor(), max_length=20)
    prompt = encoder.encode(("one two", picture(1, (64, 32)), "three", picture(2, (64, 32))))
    assert prompt.token_ids == (4, 4, 99, 99, 6, 99, 99)
    assert prompt.raw_token_ids == (4, 4, 8, 6, 8)
    row = prompt_row(encoder, prompt, 0, {"uid": "a"})
    assert row["position_ids"].tolist() == [0] * 13 + list(range(7))
    assert row["multi_modal_inputs"]["pixels"].shape == (2, 3, 32, 64)


def test_image_sizes_that_a_processor_cannot_combine_are_named() -> None:
    encoder = PromptEncoder(WordTokenizer(), SquareProcessor(), max_length=20)
    with pytest.raises(ValueError, match="pixels of different shapes"):
        encoder.image_inputs([picture(1), picture(2, (64, 32))])


def test_position_ids_equal_those_of_the_model(processor: Any) -> None:
    """OSGym keeps only the first of Qwen-VL's three rows of positions."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    config = Qwen3VLConfig(image_token_id=processor.image_token_id)
    config.vision_config.spatial_merge_size = processor.image_processor.merge_size
    encoder = PromptEncoder(processor.tokenizer, processor, max_length=64)
    prompt = encoder.encode(("the task", picture(1, (96, 64)), "said", picture(2, (64, 96))))
    tokens = StepTokens(prompt=prompt, response_ids=(7, 8, 9))
    row = step_row(encoder, tokens, 0, {"uid": "a"}, reward=1.0, max_response_length=5)
    inputs = model_inputs(collate([row]))
    mask = inputs["attention_mask"].bool()
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    expected, _ = model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=(inputs["input_ids"] == processor.image_token_id).int(),
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    assert inputs["position_ids"].shape == (3, 1, 69)
    assert torch.equal(inputs["position_ids"][:, mask], expected[:, mask])


def test_screenshot_is_encoded_once_and_the_cache_is_bounded() -> None:
    class Counting(SquareProcessor):
        num_calls = 0

        def __call__(self, **options: Any) -> Any:
            self.num_calls += 1
            return super().__call__(**options)

    counting = Counting()
    one = 3 * 64 * 64 * 4
    encoder = PromptEncoder(WordTokenizer(), counting, max_length=99, cache_bytes=2 * one)
    for shades in ((1,), (1, 2), (1, 2), (1, 2, 3)):
        encoder.encode(("task", *map(picture, shades)))
    assert counting.num_calls == 3
    encoder.encode(("task", picture(1)))
    assert counting.num_calls == 4


def test_raw_prompts_of_equal_length_are_still_one_object_per_row() -> None:
    encoder = PromptEncoder(WordTokenizer(), max_length=4)
    batch = collate([prompt_row(encoder, encoder.encode(("a b",)), worker, {"uid": "a"}) for worker in range(3)])
    assert batch["raw_prompt_ids"].shape == (3,)
    assert batch["raw_prompt_ids"][0] == [2, 2]
    assert batch["input_ids"].tolist() == [[0, 0, 2, 2]] * 3
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1]] * 3
