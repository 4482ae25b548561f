"""The published Qwen3-VL tokenizer and processor, built from Qwen's published ranks: real token counts and real ids
without the model's own files.

The ranks (151,643 byte sequences, one a line with its id) are part of the wheel `qwen-agent`; `scripts/setup tokenizer`
puts it into var/real-tokenizer. That package is not imported.
"""

import base64
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.processes import BenchmarkError
from osworld_pipeline.agent.processor import make_processor
from osworld_pipeline.training.tiny.model import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN, PLAIN_TOKENS, SPECIAL_TOKENS

RANKS_FILE = Path(__file__).parents[1] / "var" / "real-tokenizer" / "qwen_agent" / "utils" / "qwen.tiktoken"
RANKS_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
NUM_RANKS = 151_643
FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
ADDED_TOKENS = (*SPECIAL_TOKENS, *PLAIN_TOKENS[:2], *FIM_TOKENS, *PLAIN_TOKENS[2:])
"""The tokens in the order of their ids, from 151,643 on."""
VOCAB_SIZE = 151_936
"""Rows of the published embedding; the tokenizer has 151,669 ids."""
MAX_POSITIONS = 262_144
# Qwen2's pattern. It equals the tiny tokenizer's, which the tests of real ids check.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_ranks(file: Path = RANKS_FILE) -> dict[bytes, int]:
    """
    Raises:
        BenchmarkError: the file is missing, or is not the published one.
    """
    if not file.is_file():
        raise BenchmarkError(f"no ranks of Qwen's tokenizer at {file}: run scripts/setup tokenizer")
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != RANKS_SHA256:
        raise BenchmarkError(
            f"{file} is not the published file (SHA-256 {digest}): remove it, run scripts/setup tokenizer"
        )
    pairs = (line.split() for line in content.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def recover_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that made each token, in the order of the ids: the last two parts after its bytes are merged with all
    lower ranks."""
    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    return [_last_merge(ranks, token, rank) for rank, token in by_rank]


def _last_merge(ranks: Mapping[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        found = [
            (ranks.get(left + right, limit), index) for index, (left, right) in enumerate(itertools.pairwise(parts))
        ]
        rank, index = min(found)
        if rank >= limit:
            raise BenchmarkError(f"token {limit} cannot be merged from lower ranks")
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


@functools.cache
def tokenizer_json() -> str:
    """The tokenizer in the format of `tokenizers`. Raises BenchmarkError."""
    ranks = read_ranks()
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(text(left), text(right)) for left, right in recover_merges(ranks)]
    bpe = Tokenizer(models.BPE(vocab={text(token): rank for token, rank in ranks.items()}, merges=merges))
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(token, special=token in SPECIAL_TOKENS, normalized=False) for token in ADDED_TOKENS])
    return bpe.to_str()


def build_real_processor(folder: Path) -> Any:
    """Write the published processor's files to `folder`; returns the processor. Raises BenchmarkError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(), indent=1))
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65_536, "longest_edge": 16_777_216},
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = make_processor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(folder)
    return processor


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": MAX_POSITIONS,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
    }
