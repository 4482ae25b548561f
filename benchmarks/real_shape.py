"""The published shape of Qwen3-VL-4B with random weights, and the floating-point operations of its updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.initialization import no_init_weights

from benchmarks.real_tokenizer import ADDED_TOKENS, MAX_POSITIONS, NUM_RANKS, VOCAB_SIZE
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.model import MatmulPatchEmbed

SHARPNESS = 3.0
"""Random weights give all tokens about equal probabilities, which would hide most errors. The last norm's weight
is set to this, which makes a few hundred tokens likely instead of a hundred thousand."""

UpdateKind = Literal["sft", "gspo", "sft_lora", "gspo_lora"]
TEXT_PASSES: dict[UpdateKind, int] = {"sft": 3, "gspo": 4, "sft_lora": 2, "gspo_lora": 3}
"""Cost of an update in units of a forward pass: one forward pass, one for the gradients of the activations, one for
those of the weights (which frozen weights do not have), and gspo's forward pass that scores before the update."""
VISION_PASSES: dict[UpdateKind, int] = {"sft": 1, "gspo": 2, "sft_lora": 1, "gspo_lora": 2}
"""The tower is frozen, so it only runs forward."""


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself: a GPU, and a CPU with AVX-512 BF16 or AMX. On others a product
    takes two to 200 times as long as in float32."""
    return device.type == "cuda" or bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a Qwen3-VL; without arguments the published 4B's."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    max_positions: int = MAX_POSITIONS
    vision_depth: int = 24
    vision_hidden_size: int = 1024
    vision_intermediate_size: int = 4096
    vision_heads: int = 16
    deepstack_layers: tuple[int, ...] = (5, 11, 17)

    def config(self) -> Qwen3VLConfig:
        ids = {token: NUM_RANKS + index for index, token in enumerate(ADDED_TOKENS)}
        return Qwen3VLConfig(
            text_config={
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": self.max_positions,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5_000_000.0,
                    "mrope_section": list(self.mrope_section),
                    "mrope_interleaved": True,
                },
                "bos_token_id": ids["<|endoftext|>"],
                "eos_token_id": ids["<|im_end|>"],
                "tie_word_embeddings": True,
            },
            vision_config={
                "depth": self.vision_depth,
                "hidden_size": self.vision_hidden_size,
                "intermediate_size": self.vision_intermediate_size,
                "num_heads": self.vision_heads,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": self.hidden_size,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": list(self.deepstack_layers),
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=True,
        )

    @property
    def layer_weights(self) -> int:
        """Number of matrix weights of one layer of the language model."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def trained_weights(self) -> int:
        """Trained weights of a full update with a frozen tower, without norms."""
        return self.num_layers * self.layer_weights + self.vocab_size * self.hidden_size

    def text_flops(self, num_tokens: int, num_response_tokens: int) -> float:
        """FLOPs of one forward pass of the language model over one sequence: two for each weight and token (6ND's 2ND),
        and the products of attention (PaLM, arXiv 2204.02311, appendix B), of which a causal mask leaves half. Only
        response tokens have logits."""
        weights = 2.0 * self.num_layers * self.layer_weights * num_tokens
        attention = 2.0 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2
        return weights + attention + 2.0 * self.hidden_size * self.vocab_size * num_response_tokens

    def vision_flops(self, num_patches: int) -> float:
        """FLOPs of one forward pass of the tower over one image: its layers, the attention of all patches to all, and
        the mergers, one more for each layer of deepstack. The patch embedding is left out (under 1%)."""
        width = self.vision_hidden_size
        per_patch = self.vision_depth * (4 * width**2 + 2 * width * self.vision_intermediate_size)
        attention = 4.0 * self.vision_depth * width * num_patches**2
        merger = (4 * width) ** 2 + 4 * width * self.hidden_size
        num_mergers = 1 + len(self.deepstack_layers)
        return 2.0 * per_patch * num_patches + attention + 2.0 * num_mergers * merger * num_patches / 4

    def update_flops(self, kind: UpdateKind, trajectories: Sequence[Trajectory], image_patches: Sequence[int]) -> float:
        """The numerator of model FLOP utilisation, for one update with one epoch and no reference model. Recomputation,
        padding and the factors of adapters (under 2%) do not count. `image_patches`: patches of each image that the
        tower encodes."""
        text = sum(self.text_flops(len(one.token_ids), sum(one.response_mask)) for one in trajectories)
        vision = sum(map(self.vision_flops, image_patches))
        return TEXT_PASSES[kind] * text + VISION_PASSES[kind] * vision


def build_model(
    architecture: Architecture,
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    sharpness: float = SHARPNESS,
) -> Any:
    """A model as returned by `load_policy`, with random weights created on the device, ready to sample or train."""
    torch.manual_seed(seed)
    model_class: Any = Qwen3VLForConditionalGeneration
    with torch.device(device), no_init_weights():
        model = model_class._from_config(architecture.config(), dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    with torch.no_grad():
        # Initialise each module once: the default initialises the embedding, most of a thin model, three times.
        for module in model.modules():
            if module is not model.lm_head:
                model._init_weights(module)
    model.model.visual.patch_embed = MatmulPatchEmbed(model.model.visual.patch_embed)
    with torch.no_grad():
        model.model.language_model.norm.weight.fill_(sharpness)
    return model.eval()
