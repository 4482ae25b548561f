"""The estimate against bytes that torch counts, on a random model large enough for its layers to outweigh the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.training.batch import Batch
from osworld_pipeline.training.memory import activations
from osworld_pipeline.training.memory.model_shapes import ModelShape
from osworld_pipeline.training.model import MatmulPatchEmbed
from osworld_pipeline.training.objective.score import score_responses, training_mode
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.weights import lora

IMAGE = 4000
NUM_TOKENS, NUM_RESPONSES = 1024, 32
NUM_IMAGES, SIDE = 2, 8
"""Images of SIDE x SIDE tokens."""
NUM_PATCHES = NUM_IMAGES * 4 * SIDE * SIDE
NUM_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def config() -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [16, 8, 8],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": 256,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=4001,
        vision_start_token_id=4002,
        vision_end_token_id=4003,
        tie_word_embeddings=True,
    )


SHAPE = ModelShape.of_config(config().to_dict())


def make_model(dtype: torch.dtype, *, train_vision: bool = False, is_checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = Qwen3VLForConditionalGeneration._from_config(config(), attn_implementation="sdpa")
    model.to(dtype)
    model.model.visual.patch_embed = MatmulPatchEmbed(model.model.visual.patch_embed)
    model.model.visual.requires_grad_(train_vision)
    if is_checkpointed:
        model.activation_checkpointing_enable()
    return model


def make_batch() -> Batch:
    ids = torch.randint(0, 3000, (1, NUM_TOKENS))
    mask = torch.zeros(1, NUM_TOKENS, dtype=torch.bool)
    mask[0, -NUM_RESPONSES:] = True
    for index in range(NUM_IMAGES):
        start = 10 + index * (SIDE * SIDE + 5)
        ids[0, start : start + SIDE * SIDE] = IMAGE
    return Batch(
        input_ids_RL=ids,
        position_ids_3RL=torch.arange(NUM_TOKENS)[None, None].expand(3, 1, NUM_TOKENS),
        response_mask_RL=mask,
        response_mask_BT=mask,
        packed_lengths=None,
        pixel_values=torch.randn(NUM_PATCHES, 1536),
        image_grid_U3=torch.tensor([[1, 2 * SIDE, 2 * SIDE]] * NUM_IMAGES),
        image_index_I=tuple(range(NUM_IMAGES)),
        num_tokens=NUM_TOKENS,
    )


def saved_bytes(model: Any, batch: Batch) -> int:
    """The bytes that autograd keeps of a pass, each storage once and without the weights."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in own:
            kept.setdefault(key, tensor)
        return tensor

    with training_mode(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score_responses(model, batch).logprobs_BT.sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that torch's allocator has handed out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def estimated_activations(num_bytes: int, *, is_checkpointed: bool) -> int:
    text = SHAPE.text
    layer = activations.text_layer_bytes(text, num_tokens=NUM_TOKENS, num_bytes=num_bytes)
    logits = NUM_RESPONSES * text.vocab_size * 4  # the forward pass keeps log-probabilities alone
    kept = activations.text_outside_bytes(text, num_tokens=NUM_TOKENS, num_bytes=num_bytes) + logits
    if is_checkpointed:
        return kept + layer + activations.text_checkpoint_bytes(text, num_tokens=NUM_TOKENS, num_bytes=num_bytes)
    return kept + text.num_layers * layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_autograd_keeps_are_as_estimated(dtype: torch.dtype) -> None:
    measured = saved_bytes(make_model(dtype), make_batch())
    assert estimated_activations(NUM_BYTES[dtype], is_checkpointed=False) == pytest.approx(measured, rel=0.03)


def test_the_bytes_that_a_trained_vision_tower_keeps_are_as_estimated() -> None:
    measured = saved_bytes(make_model(torch.float32, train_vision=True), make_batch())
    measured -= saved_bytes(make_model(torch.float32), make_batch())
    vision = SHAPE.vision
    block = activations.vision_block_bytes(vision, num_patches=NUM_PATCHES, num_bytes=4)
    outside = activations.vision_outside_bytes(vision, num_patches=NUM_PATCHES, num_bytes=4)
    assert vision.depth * block + outside == pytest.approx(measured, rel=0.15)


def test_the_bytes_that_adapters_keep_are_as_estimated() -> None:
    section, model = LoraSection(rank=8), make_model(torch.bfloat16)
    lora.add_adapters(model, section, seed=0)
    measured = saved_bytes(model, make_batch())
    layer = activations.lora_layer_bytes(SHAPE.text, section, num_tokens=NUM_TOKENS, num_bytes=2)
    outside = activations.text_outside_bytes(SHAPE.text, num_tokens=NUM_TOKENS, num_bytes=2)
    assert SHAPE.text.num_layers * layer + outside == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("dtype", "is_checkpointed"), [(torch.bfloat16, False), (torch.float32, True)])
def test_the_peak_of_a_forward_and_backward_pass_is_at_most_activations_and_gradients(
    dtype: torch.dtype, is_checkpointed: bool
) -> None:
    """It is at most that, because the last gradients are made after the first activations are freed."""
    model, batch = make_model(dtype, is_checkpointed=is_checkpointed), make_batch()

    def work() -> None:
        with training_mode(model):
            score_responses(model, batch).logprobs_BT.sum().backward()

    activation_bytes = estimated_activations(NUM_BYTES[dtype], is_checkpointed=is_checkpointed)
    gradient_bytes = SHAPE.text.parameters * NUM_BYTES[dtype]
    measured = peak_bytes(work)
    assert 0.85 * activation_bytes < measured < 1.05 * (activation_bytes + gradient_bytes)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 16), (torch.bfloat16, 20)])
def test_weights_gradients_masters_and_moments_are_exact(dtype: torch.dtype, num_bytes: int) -> None:
    model = make_model(dtype, train_vision=True)
    optimizer = MasterAdamW(model.named_parameters(), learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    with training_mode(model):
        score_responses(model, make_batch()).logprobs_BT.sum().backward()
    tensors = [tensor for param in model.parameters() for tensor in (param, param.grad) if tensor is not None]
    if dtype != torch.float32:
        optimizer.collect_gradients()
        tensors += [master.grad for master in optimizer._masters if master.grad is not None]
    tensors += [tensor for name, tensor in optimizer.state_dict().items() if not name.startswith("step/")]
    assert sum(tensor.nbytes for tensor in tensors) == num_bytes * SHAPE.parameters
