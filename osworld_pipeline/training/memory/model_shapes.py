"""Sizes of a Qwen3-VL, from its config.json or by name, and the resulting numbers of parameters.

Needs no torch and no weights. Layers are those of transformers' `Qwen3VLForConditionalGeneration`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes.schema import PretrainedModelSection, TinyModelSection
from osworld_pipeline.training.tiny.config import text_config, vision_config

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """The language model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """Whether the output projection shares the token embedding."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, equal to that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer of a decoder layer, by its name."""
        hidden, query, kv, wide = self.hidden_size, self.query_size, self.kv_size, self.intermediate_size
        return {
            "q_proj": (hidden, query),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }

    @property
    def layer_parameters(self) -> int:
        norms = 2 * self.hidden_size + 2 * self.head_dim
        return sum(inputs * outputs for inputs, outputs in self.linear_layers.values()) + norms

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Outside of the layers: embedding, output projection if it is not tied, last norm."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.root_parameters


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """The vision tower with its mergers."""

    hidden_size: int
    intermediate_size: int
    depth: int
    num_heads: int
    out_hidden_size: int
    patch_values: int
    """Numbers of one patch: channels x frames x side x side."""
    merge_size: int
    num_positions: int
    num_deepstack: int

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of the concatenated patches of one token."""
        return self.hidden_size * self.patches_per_token

    @property
    def block_parameters(self) -> int:
        hidden, wide = self.hidden_size, self.intermediate_size
        attention = 4 * hidden * hidden + 4 * hidden
        mlp = 2 * hidden * wide + wide + hidden
        return attention + mlp + 4 * hidden

    @property
    def root_parameters(self) -> int:
        """Outside of the blocks: patch embedding, positions, merger and deepstack mergers."""
        hidden, merged, out = self.hidden_size, self.merged_size, self.out_hidden_size
        projections = merged * merged + merged + merged * out + out
        mergers = (1 + self.num_deepstack) * projections + 2 * hidden + 2 * merged * self.num_deepstack
        return hidden * self.patch_values + hidden + self.num_positions * hidden + mergers

    @property
    def parameters(self) -> int:
        return self.depth * self.block_parameters + self.root_parameters


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    text: TextShape
    vision: VisionShape

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape in a config.json, given as a mapping. Raises KeyError, TypeError."""
        text, vision = config["text_config"], config["vision_config"]
        is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        frames, side = vision.get("temporal_patch_size", 2), vision.get("patch_size", 16)
        return cls(
            text=TextShape(
                hidden_size=text["hidden_size"],
                intermediate_size=text["intermediate_size"],
                num_layers=text["num_hidden_layers"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                vocab_size=text["vocab_size"],
                is_tied=bool(is_tied),
            ),
            vision=VisionShape(
                hidden_size=vision["hidden_size"],
                intermediate_size=vision["intermediate_size"],
                depth=vision["depth"],
                num_heads=vision["num_heads"],
                out_hidden_size=vision["out_hidden_size"],
                patch_values=vision.get("in_channels", 3) * frames * side * side,
                merge_size=vision.get("spatial_merge_size", 2),
                num_positions=vision["num_position_embeddings"],
                num_deepstack=len(vision["deepstack_visual_indexes"]),
            ),
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """The shape in a model's folder. Raises StoreError."""
        path = folder / CONFIG_FILE
        try:
            return cls.of_config(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} does not contain the sizes of a Qwen3-VL ({error!r})") from error

    @property
    def parameters(self) -> int:
        return self.text.parameters + self.vision.parameters

    @property
    def root_parameters(self) -> int:
        """Outside of all layers and blocks: the root group of FSDP2."""
        return self.text.root_parameters + self.vision.root_parameters


def shape_of(model: TinyModelSection | PretrainedModelSection) -> ModelShape | None:
    """Sizes of a recipe's model; None for a published model that is neither a local folder nor listed below. Raises
    StoreError."""
    if isinstance(model, TinyModelSection):
        vocab_size = -(-model.vocab_size // 64) * 64
        return ModelShape.of_config(
            {"text_config": text_config(model, vocab_size=vocab_size), "vision_config": vision_config(model)}
        )
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return ModelShape.of_folder(folder)
    return PUBLISHED.get(model.path)


def _published(
    *, hidden: int, wide: int, layers: int, heads: int, is_tied: bool, is_large_vision: bool = False
) -> ModelShape:
    return ModelShape(
        text=TextShape(
            hidden_size=hidden,
            intermediate_size=wide,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151_936,
            is_tied=is_tied,
        ),
        vision=VisionShape(
            hidden_size=1152 if is_large_vision else 1024,
            intermediate_size=4304 if is_large_vision else 4096,
            depth=27 if is_large_vision else 24,
            num_heads=16,
            out_hidden_size=hidden,
            patch_values=3 * 2 * 16 * 16,
            merge_size=2,
            num_positions=2304,
            num_deepstack=3,
        ),
    )


_SIZES = {
    "2B": _published(hidden=2048, wide=6144, layers=28, heads=16, is_tied=True),
    "4B": _published(hidden=2560, wide=9728, layers=36, heads=32, is_tied=True),
    "8B": _published(hidden=4096, wide=12_288, layers=36, heads=32, is_tied=False, is_large_vision=True),
}
PUBLISHED: Mapping[str, ModelShape] = {
    f"Qwen/Qwen3-VL-{size}-{kind}": shape for size, shape in _SIZES.items() for kind in ("Instruct", "Thinking")
}
"""The published config.json files in numbers, by hub id, so that recipes are checked before any download."""
