"""Bytes that a pass keeps for its backward pass, computed from sizes. Imports no torch.

The accounting is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, section 4.1): for each operation, the tensors that its backward formula reads, each counted once.
Their formula is for GPT layers with dropout; the terms here are those of Qwen3-VL's layers in transformers, whose
attention kernel keeps no matrix of tokens by tokens (Dao et al. 2022, arXiv 2205.14135).

Letters: h hidden size, a width of the queries, k of the keys, f of the MLP, b bytes per number in the model's dtype.
"""

from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.training.memory.model_shapes import TextShape, VisionShape

FLOAT = 4
"""Bytes of a float32."""


def text_layer_bytes(shape: TextShape, *, num_tokens: int, num_bytes: int) -> int:
    """Kept by one decoder layer whose weights are all trained:

    two norms of the hidden state   2 (4 h + 2 b h)    float32 input, normalised, output
    norms of queries and keys       (4 + b)(a + k)     float32 input, normalised
    attention                       2 b (a + k) + 4 n  queries, keys, values, output; log-sum of each of n heads
    MLP                             4 b f              gate, its activation, up, their product
    """
    h, a, k, f = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    norms = 2 * (FLOAT + 2 * num_bytes) * h + (FLOAT + num_bytes) * (a + k)
    attention = 2 * num_bytes * (a + k) + FLOAT * shape.num_heads
    return num_tokens * (norms + attention + 4 * num_bytes * f)


def lora_layer_bytes(shape: TextShape, section: LoraSection, *, num_tokens: int, num_bytes: int) -> int:
    """Kept by one decoder layer under adapters. The backward pass of frozen weights does not read their inputs, so the
    normalised states, norms' outputs and the MLP's product are not kept; each adapted layer keeps its input and its
    rank's outputs in float32, in peft's own copy."""
    h, a, k, f = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    norms = 2 * FLOAT * h + FLOAT * (a + k)
    attention = 2 * num_bytes * (a + k) + FLOAT * shape.num_heads
    adapters = sum(
        FLOAT * (inputs + section.rank)
        for name, (inputs, _) in shape.linear_layers.items()
        if name in section.target_modules
    )
    return num_tokens * (norms + attention + 3 * num_bytes * f + adapters)


def text_outside_bytes(shape: TextShape, *, num_tokens: int, num_bytes: int) -> int:
    """Kept by the last norm and the rotary tables: 4 h + 2 b h + 2 b (width of a head)."""
    return num_tokens * ((FLOAT + 2 * num_bytes) * shape.hidden_size + 2 * num_bytes * shape.head_dim)


def text_checkpoint_bytes(shape: TextShape, *, num_tokens: int, num_bytes: int) -> int:
    """The input of each layer: all that is kept if layers are recomputed in the backward pass (Chen et al. 2016, arXiv
    1604.06174)."""
    return shape.num_layers * num_tokens * num_bytes * shape.hidden_size


def logits_bytes(shape: TextShape, *, num_tokens: int, num_bytes: int, max_chunk_logits: int) -> int:
    """Bytes of the output projection of `num_tokens` response tokens, in chunks: the logits in the model's dtype and in
    float32, log-probabilities, probabilities (the entropy's), and in the backward pass two gradients in float32 and one
    in the model's dtype."""
    chunk_tokens = max(1, max_chunk_logits // shape.vocab_size)
    num_logits = min(num_tokens, chunk_tokens) * shape.vocab_size
    return num_logits * (2 * num_bytes + 5 * FLOAT)


def vision_block_bytes(shape: VisionShape, *, num_patches: int, num_bytes: int) -> int:
    """Kept by one trained block: per patch b (9 h + 2 f) and the log-sum of each head. Two norms keep input and output,
    attention its queries, keys, values, output and the output joined over images, the MLP both sides of its
    activation."""
    per_patch = num_bytes * (9 * shape.hidden_size + 2 * shape.intermediate_size) + FLOAT * shape.num_heads
    return num_patches * per_patch


def vision_outside_bytes(shape: VisionShape, *, num_patches: int, num_bytes: int) -> int:
    """Kept by the trained patch embedding (its input) and by the merger and the deepstack mergers: norm's input and
    output, both sides of the activation."""
    mergers = (1 + shape.num_deepstack) * 4 * shape.hidden_size
    return num_patches * num_bytes * (shape.patch_values + mergers)


def vision_checkpoint_bytes(shape: VisionShape, *, num_patches: int, num_bytes: int) -> int:
    """The input of each block."""
    return shape.depth * num_patches * num_bytes * shape.hidden_size


def vision_forward_bytes(shape: VisionShape, *, num_patches: int, num_bytes: int) -> int:
    """Allocated at the same time in a block that keeps nothing (a frozen tower): the residual, the joint projection of
    queries, keys and values, and the rotary positions' float32 copies of queries and keys with their products; or, if
    they are larger, the tensors of the MLP."""
    per_patch = shape.hidden_size * (5 * num_bytes + 8 * FLOAT)
    return num_patches * max(per_patch, num_bytes * (2 * shape.hidden_size + 2 * shape.intermediate_size))


def image_bytes(shape: VisionShape, *, num_patches: int, num_bytes: int) -> int:
    """Bytes of the images of a pass: pixel values in float32 and in the model's dtype, features and deepstack
    features."""
    pixels = num_patches * shape.patch_values * (FLOAT + num_bytes)
    num_tokens = num_patches // shape.patches_per_token
    return pixels + num_tokens * num_bytes * shape.out_hidden_size * (1 + shape.num_deepstack)
