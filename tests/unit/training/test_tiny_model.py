import io
import unicodedata
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from training_samples import CORPUS, SMALL, conversation, picture
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.recipes import load_recipe, recipe_names
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import SPECIAL_TOKENS, build_model, build_tiny_checkpoint, model_config


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_spec_and_corpus_give_the_same_bytes(tmp_path: Path, tiny_folder: Path):
    build_tiny_checkpoint(tmp_path / "again", SMALL, CORPUS)
    assert digests(tmp_path / "again") == digests(tiny_folder)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tmp_path: Path, tiny_folder: Path):
    build_tiny_checkpoint(tmp_path / "other", SMALL.model_copy(update={"seed": 2}), CORPUS)
    first, other = digests(tiny_folder), digests(tmp_path / "other")
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def test_building_does_not_change_the_callers_random_state(processor):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_model(SMALL, processor.tokenizer)
    assert torch.equal(before, torch.get_rng_state())


def test_every_digit_is_a_token_of_its_own(processor):
    ids = processor.tokenizer("[102,7]")["input_ids"]
    pieces = [processor.tokenizer.decode([token]) for token in ids]
    assert [piece for piece in pieces if piece.isdigit()] == ["1", "0", "2", "7"]


def test_special_tokens_have_one_id_each_and_tool_call_survives_decoding(processor):
    tokenizer = processor.tokenizer
    assert isinstance(tokenizer, Qwen2Tokenizer)
    assert len({tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}) == len(SPECIAL_TOKENS)
    ids = tokenizer("<tool_call>a</tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>a</tool_call>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_in_composed_form_survives_the_tokenizer(processor, text):
    text = unicodedata.normalize("NFC", text)
    ids = processor.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_loader_of_published_models_computes_what_the_stock_class_computes(tiny_folder: Path, processor):
    trajectory = conversation(processor, 1)
    arrays = build_model_inputs(processor, [(trajectory.token_ids, trajectory.images)])
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    stock = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder)
    with torch.no_grad():
        difference = (stock(**inputs).logits - load_model(tiny_folder)(**inputs).logits).abs().max()
    assert float(difference) < 1e-5


def test_saved_weights_keep_the_names_of_the_stock_class(tiny_folder: Path, tmp_path: Path):
    load_model(tiny_folder).save_pretrained(tmp_path)
    assert digests(tmp_path)["model.safetensors"] == digests(tiny_folder)["model.safetensors"]


def test_the_chat_template_gives_the_renderers_tokens(processor):
    trajectory = conversation(processor, 3, num_turns=1)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You operate a computer."}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": Image.open(io.BytesIO(picture(3)))},
                {"type": "text", "text": "[Task]\nDo 3"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Action: click 3"}]},
    ]
    encoded = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np")
    assert np.array_equal(encoded["input_ids"][0], np.array(trajectory.token_ids))


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name).model.kind == "tiny"])
def test_the_tiny_model_of_every_recipe_can_be_built(name: str, processor):
    spec = load_recipe(name).model
    config = model_config(spec, processor.tokenizer)
    assert sum(config.text_config.rope_parameters["mrope_section"]) == config.text_config.head_dim // 2
    assert build_model(spec, processor.tokenizer).num_parameters() < 5_000_000


def test_a_width_that_no_head_divides_is_refused(processor):
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 32"):
        model_config(SMALL.model_copy(update={"hidden_size": 50}), processor.tokenizer)
