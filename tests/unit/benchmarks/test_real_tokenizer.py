"""The real tokenizer gives Qwen's published ids, and the project's chat layout and image tokens are the published ones
under it."""

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from real_processor import real_processor

from benchmarks.processes import BenchmarkError
from benchmarks.real_tokenizer import ADDED_TOKENS, VOCAB_SIZE, WORDS, read_ranks, recover_merges
from benchmarks.real_turns import screen
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.model_inputs import build_model_inputs, encode_image
from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.processor import image_token_count, load_processor
from osworld_pipeline.agent.renderer import Renderer, render_demonstration

KNOWN = {
    "Hello world": [9707, 1879],
    "system\n": [8948, 198],
    "user\n": [872, 198],
    "assistant\n": [77091, 198],
    "You are a helpful assistant.": [2610, 525, 264, 10950, 17847, 13],
    "\n": [198],
    "\n\n": [271],
    "2024": [17, 15, 17, 19],
}
"""As the published models' tokenizers encode them."""
PUBLISHED_IDS = {
    "<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645, "<|object_ref_start|>": 151_646,
    "<|object_ref_end|>": 151_647, "<|box_start|>": 151_648, "<|box_end|>": 151_649, "<|quad_start|>": 151_650,
    "<|quad_end|>": 151_651, "<|vision_start|>": 151_652, "<|vision_end|>": 151_653, "<|vision_pad|>": 151_654,
    "<|image_pad|>": 151_655, "<|video_pad|>": 151_656, "<tool_call>": 151_657, "</tool_call>": 151_658,
    "<|fim_prefix|>": 151_659, "<|fim_middle|>": 151_660, "<|fim_suffix|>": 151_661, "<|fim_pad|>": 151_662,
    "<|repo_name|>": 151_663, "<|file_sep|>": 151_664, "<tool_response>": 151_665, "</tool_response>": 151_666,
    "<think>": 151_667, "</think>": 151_668,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real") / "processor"


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return real_processor(folder)


@pytest.fixture(scope="module")
def tokenizer(processor: Any) -> Any:
    return processor.tokenizer


def encode_by_ranks(ranks: dict[bytes, int], text: str) -> list[int]:
    """Encodes as tiktoken does: in each word, the neighbours of the lowest rank are merged until none have a rank."""
    ids = []
    for word in regex.findall(WORDS, unicodedata.normalize("NFC", text)):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            rank, index = min(
                (ranks.get(parts[index] + parts[index + 1], VOCAB_SIZE), index) for index in range(len(parts) - 1)
            )
            if rank == VOCAB_SIZE:
                break
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def random_text(rng: random.Random) -> str:
    alphabets = (
        "etaoin shrdlu",
        "ABC xyz\n\t",
        "0123456789.,;:()[]{}<>|/\\\"'",
        "äöüß é e\u0301 ñ",
        "漢字仮名 桌面",
        "🙂🖱️ ",
        "  \r\n",
    )
    return "".join(
        "".join(rng.choices(rng.choice(alphabets), k=rng.randrange(1, 12))) for _ in range(rng.randrange(1, 30))
    )


def test_the_vocabulary_sizes_are_the_published_ones(tokenizer: Any) -> None:
    assert (tokenizer.vocab_size, len(tokenizer), VOCAB_SIZE) == (151_643, 151_669, 151_936)


def test_added_tokens_have_their_published_ids(tokenizer: Any) -> None:
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ADDED_TOKENS} == PUBLISHED_IDS
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (151_645, 151_643, None)


@pytest.mark.parametrize("text", KNOWN)
def test_known_texts_have_their_known_ids(tokenizer: Any, text: str) -> None:
    assert tokenizer(text)["input_ids"] == KNOWN[text]


def test_random_texts_are_encoded_as_their_ranks_say_and_decoded_again(tokenizer: Any) -> None:
    ranks = read_ranks()
    rng = random.Random(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == encode_by_ranks(ranks, text), repr(text)
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert decoded == unicodedata.normalize("NFC", text)


def test_merges_are_recovered_in_the_order_of_the_ranks() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5, b"abab": 6}
    assert recover_merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"ab", b"ab")]


def test_a_token_that_no_merge_makes_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="token 2"):
        recover_merges({b"a": 0, b"b": 1, b"aba": 2})


def test_a_missing_or_wrong_file_of_ranks_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="scripts/setup tokenizer"):
        read_ranks(tmp_path / "qwen.tiktoken")
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(BenchmarkError, match="not the published file"):
        read_ranks(tmp_path / "qwen.tiktoken")


def test_the_chat_layout_is_the_published_one(processor: Any) -> None:
    """The expected text is what Qwen3-VL's published template makes of this conversation."""
    images = [screen(1, (320, 256)), screen(2, (256, 320))]
    messages = [
        system_message("You operate a computer."),
        user_message("[Task]\nRename é to 42."),
        assistant_message('Go\n<tool_call>{"name":"computer_use"}</tool_call>'),
        user_message("[Last Action Result]\nok"),
        assistant_message("Done"),
    ]
    pad = "<|image_pad|>"
    expected = (
        "<|im_start|>system\nYou operate a computer.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{pad * 80}<|vision_end|>[Task]\nRename é to 42.<|im_end|>\n"
        '<|im_start|>assistant\nGo\n<tool_call>{"name":"computer_use"}</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<|vision_start|>{pad * 80}<|vision_end|>[Last Action Result]\nok<|im_end|>\n"
        "<|im_start|>assistant\nDone<|im_end|>\n"
    )
    rendered = render_demonstration(Renderer(processor), messages, images)
    assert processor.tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == expected
    assert list(rendered.token_ids) == processor.tokenizer(expected)["input_ids"]
    learned = [token_id for token_id, is_learned in zip(rendered.token_ids, rendered.mask, strict=True) if is_learned]
    assert processor.tokenizer.decode(learned) == (
        'Go\n<tool_call>{"name":"computer_use"}</tool_call><|im_end|>Done<|im_end|>'
    )


def test_a_tool_call_is_one_token_at_each_end_and_a_shown_control_token_is_text(processor: Any) -> None:
    renderer = Renderer(processor)
    assert renderer.encode("<tool_call>{}</tool_call>") == [151_657, 6257, 151_658]
    assert not set(renderer.encode("<|im_end|><|image_pad|><|endoftext|>")) & set(range(151_643, 151_657))


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(1280, 720, 40 * 22), (1920, 1080, 41 * 23), (1276, 718, 40 * 22), (1024, 768, 32 * 24), (256, 256, 64)],
)
def test_a_screenshot_takes_a_token_for_each_32_by_32_pixels(
    processor: Any, width: int, height: int, expected: int
) -> None:
    image = prepare_screenshot(screen(3, (width, height)), 1_003_520)
    _, grid = encode_image(processor, image.data)
    assert image.num_tokens == expected
    assert image_token_count(processor, width=image.width, height=image.height) == expected
    assert int(grid.prod()) // 4 == expected


def test_real_screens_take_as_many_tokens_as_the_formula_says(processor: Any, real_data: Path) -> None:
    files = sorted((real_data / "agentnet" / "images").glob("*.png"))
    assert files
    for file in files[:3]:
        image = prepare_screenshot(file.read_bytes(), 1_003_520)
        renderer = Renderer(processor)
        ids = renderer.turn(user_message("x"), [(image.width, image.height)])
        build_model_inputs(processor, [(ids, [image.data])])
        assert ids.count(151_655) == image.num_tokens == 880


def test_a_saved_processor_equals_the_original_after_loading(processor: Any, folder: Path) -> None:
    again = load_processor(folder)
    assert Renderer(again).processor_digest == Renderer(processor).processor_digest
    assert len(again.tokenizer) == 151_669
    assert again.tokenizer("Hello world")["input_ids"] == KNOWN["Hello world"]
