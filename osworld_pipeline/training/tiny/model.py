"""Builds the embedded default's base checkpoint: a Qwen3-VL of a few million parameters with its own tokenizer. Its
weights are random, apart from the copying skill that a recipe may train.

It uses transformers' own classes and Qwen3-VL's own file layout, so any program that loads it can also load a published
Qwen3-VL. The same specification and corpus give the same bytes; with copying updates, on the same machine.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from osworld_pipeline.agent.processor import make_processor
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.training.tiny.config import MERGE_SIZE, PATCH_SIZE, text_config, vision_config
from osworld_pipeline.training.tiny.pretraining import teach_copying

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One id each, but ordinary text: they are decoded even if special tokens are skipped."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type in ('image', 'image_url') or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in part %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen's pattern: words keep the space before them, every digit is one token (coordinates are spelled, not memorised).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MROPE_SECTION = (8, 4, 4)
"""Rotary dimensions of time, height and width; they add up to half of HEAD_DIM."""
MAX_IMAGE_TOKENS = 1280
MAX_POSITIONS = 32_768


def build_tiny_checkpoint(
    out_dir: Path,
    spec: TinyModelSection,
    corpus: Iterable[str],
    *,
    on_progress: Callable[[int, float], None] = lambda done, loss: None,
) -> None:
    """Writes weights, configuration, tokenizer, image processor and chat template to `out_dir`.

    The tokenizer's merges are learned from `corpus`, in order. `on_progress`: see `teach_copying`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(corpus, vocab_size=spec.vocab_size)
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        temporal_patch_size=2,
        merge_size=MERGE_SIZE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": MAX_IMAGE_TOKENS * 32 * 32},
    )
    model = build_model(spec, tokenizer)
    if spec.copying_updates:
        teach_copying(model, tokenizer, num_updates=spec.copying_updates, seed=spec.seed, on_progress=on_progress)
    model.save_pretrained(out_dir)
    make_processor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(out_dir)


def build_tokenizer(corpus: Iterable[str], *, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` ids, including special tokens; it can encode any text."""
    num_added = len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    qwen_tokenizer: Any = Qwen2Tokenizer
    tokenizer = qwen_tokenizer(
        vocab=bpe.get_vocab(),
        merges=_merges_of(bpe),
        unk_token=None,
        bos_token=None,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merges_of(bpe: Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in merges]


def build_model(spec: TinyModelSection, tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    """Random float32 weights, the same for the same seed."""
    config = model_config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def model_config(spec: TinyModelSection, tokenizer: Any) -> Qwen3VLConfig:
    """Qwen3-VL's configuration at the specification's size."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        **text_config(spec, vocab_size=-(-len(tokenizer) // 64) * 64),
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": list(MROPE_SECTION),
            "mrope_interleaved": True,
        },
        "pad_token_id": ids[END_OF_TEXT],
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END_OF_TURN],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision_config(spec),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
