"""The sizes of the embedded default's tiny Qwen3-VL, in the format of config.json. Imports no torch."""

from typing import Any

from osworld_pipeline.recipes.schema import TinyModelSection

HEAD_DIM = 32
PATCH_SIZE = 16
MERGE_SIZE = 2
POSITION_GRID_SIDE = 48


def text_config(spec: TinyModelSection, *, vocab_size: int) -> dict[str, Any]:
    """Config of the language model. Raises ValueError if the width cannot be split into heads."""
    if spec.hidden_size % HEAD_DIM:
        raise ValueError(f"model.hidden_size must be a multiple of {HEAD_DIM}, not {spec.hidden_size}")
    num_heads = spec.hidden_size // HEAD_DIM
    return {
        "vocab_size": vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 3 * spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
    }


def vision_config(spec: TinyModelSection) -> dict[str, Any]:
    """Config of the vision tower. Raises ValueError if the width cannot be split into heads."""
    return {
        "depth": spec.vision_depth,
        "hidden_size": spec.vision_hidden_size,
        "intermediate_size": 2 * spec.vision_hidden_size,
        "num_heads": _vision_heads(spec.vision_hidden_size),
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": spec.hidden_size,
        "num_position_embeddings": POSITION_GRID_SIDE**2,
        "deepstack_visual_indexes": [spec.vision_depth - 1],
    }


def _vision_heads(hidden_size: int) -> int:
    """The number of heads, so that each has about HEAD_DIM dimensions and the heads divide the width. Two-axis rotary
    positions need a multiple of 4 dimensions per head."""
    for num_heads in range(max(1, hidden_size // HEAD_DIM), 0, -1):
        if hidden_size % num_heads == 0 and hidden_size // num_heads % 4 == 0:
            return num_heads
    raise ValueError(f"model.vision_hidden_size must be a multiple of 4, not {hidden_size}")
