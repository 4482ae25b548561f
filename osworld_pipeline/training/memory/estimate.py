"""Memory that training a recipe needs on a rank's GPU and its host, item by item, before anything is loaded.

Arithmetic on a recipe and a model's sizes: no torch, no files. The numbers are those of the rank with the largest need,
rank 0, at the longest pass that the recipe allows. Optimiser, weights and gradients are exact; activations are within
15% of a measured pass (tests/unit/training/test_memory_measured.py); assumptions are constants in this file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import PretrainedModelSection
from osworld_pipeline.training.memory import activations
from osworld_pipeline.training.memory.model_shapes import ModelShape

Stage = Literal["sft", "gspo"]
STAGES: tuple[Stage, ...] = ("sft", "gspo")
GB = 1e9
FLOAT = 4
"""Bytes of a float32: masters, moments and adapters."""
NUM_BYTES = {"float32": 4, "bfloat16": 2}
MAX_CHUNK_LOGITS = 1 << 26
"""training/objective/loss.py's; a test compares them."""
KV_GROWTH_TOKENS = 256
"""rollout/engines/transformers_cache.py's GROWTH; a test compares them."""
MIN_SLOTS = 4
"""rollout/engines/transformers_sampler.py's MIN_ROWS; a test compares them."""
FEATURE_CACHE_BYTES = 256 << 20
"""rollout/engines/transformers_sampler.py's FEATURE_BYTES; a test compares them."""
PIXEL_CACHE_BYTES: dict[Stage, int] = {"sft": 2 << 30, "gspo": 1 << 30}
"""Size of decoded pixel values on the host: runs/sft/sft_run.py's, and agent/model_inputs.py's default."""
CONTEXT_BYTES = 1_000_000_000
"""Assumed: the CUDA context, cuBLAS's workspaces and NCCL's buffers."""
FRAGMENTATION = 0.05
"""Assumed: the share of allocated memory that torch's caching allocator holds without using it."""
PROGRAM_BYTES = 4_000_000_000
"""Assumed: Python, torch with CUDA's libraries, and the catalog, on the host."""
PNG_BYTES_PER_PIXEL = 0.5
"""Assumed size of a stored screenshot."""


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    how: str
    """How the number is computed, for the reader of the table."""
    gpu_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one rank."""

    stage: Stage
    items: tuple[Item, ...]

    @property
    def gpu_bytes(self) -> int:
        return sum(item.gpu_bytes for item in self.items)

    @property
    def host_bytes(self) -> int:
        return sum(item.host_bytes for item in self.items)


def estimate(recipe: Recipe, shape: ModelShape, stage: Stage, *, may_sample: bool = True) -> Estimate:
    """The need of a rank in a stage of the recipe. `may_sample`: whether the rank may hold the program's own engine,
    as rank 0 may; True gives the largest need."""
    sizes = _Sizes(recipe=recipe, shape=shape, stage=stage, may_sample=may_sample)
    items = [*_state_items(sizes), *_activation_items(sizes), *_engine_items(sizes), *_host_items(sizes)]
    on_gpu = sum(item.gpu_bytes for item in items)
    items.append(
        Item(
            name="reserve",
            how=f"CUDA context, and {FRAGMENTATION:.0%} that the allocator holds unused (assumed)",
            gpu_bytes=CONTEXT_BYTES + int(FRAGMENTATION * on_gpu),
        )
    )
    return Estimate(stage=stage, items=tuple(item for item in items if item.gpu_bytes or item.host_bytes))


def largest_estimate(recipe: Recipe, shape: ModelShape) -> Estimate:
    """The estimate of the stage that needs most GPU memory."""
    return max((estimate(recipe, shape, stage) for stage in STAGES), key=lambda one: one.gpu_bytes)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """A recipe's numbers in the form that the formulas need."""

    recipe: Recipe
    shape: ModelShape
    stage: Stage
    may_sample: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of a weight; a tiny model is float32."""
        model = self.recipe.model
        return NUM_BYTES[model.dtype] if isinstance(model, PretrainedModelSection) else FLOAT

    @property
    def num_ranks(self) -> int:
        return self.recipe.trainer.num_processes

    @property
    def is_offloaded(self) -> bool:
        return self.recipe.trainer.cpu_offload and self.num_ranks > 1

    @property
    def trained_parameters(self) -> int:
        """The adapters' parameters; without adapters, those of the language model, and of the vision tower if it is
        trained."""
        lora, text, vision = self.recipe.trainer.lora, self.shape.text, self.shape.vision
        if lora is not None:
            layers = text.linear_layers
            per_layer = sum(sum(layers[name]) for name in lora.target_modules if name in layers)
            return text.num_layers * lora.rank * per_layer
        return text.parameters + (vision.parameters if self.recipe.trainer.train_vision else 0)

    @property
    def has_reference(self) -> bool:
        return self.stage == "gspo" and self.recipe.gspo.kl_coef > 0 and self.recipe.trainer.lora is None

    @property
    def has_engine(self) -> bool:
        return self.may_sample and self.stage == "gspo" and self.recipe.engine.kind == "transformers"

    @property
    def engine_shares_weights(self) -> bool:
        """The same decision as `shares_model` of runs/gspo/weights.py."""
        return self.has_engine and self.num_ranks == 1 and self.recipe.rollout.mode == "synchronous"

    @property
    def pass_tokens(self) -> int:
        """Tokens of the longest pass with gradients. SFT fills a pass up to trainer.max_tokens_per_batch; GSPO's holds
        at most gspo.micro_batch_size sequences of agent.max_context_tokens."""
        budget = self.recipe.trainer.max_tokens_per_batch
        if self.stage == "sft":
            return budget
        return min(budget, self.recipe.gspo.micro_batch_size * self.recipe.agent.max_context_tokens)

    @property
    def image_tokens(self) -> int:
        """Tokens of one screenshot in the model's input."""
        desktop, agent = self.recipe.desktop, self.recipe.agent
        width, height = fit_size(desktop.screen_width, desktop.screen_height, agent.max_pixels)
        return (width // 32) * (height // 32)

    def pass_patches(self, num_tokens: int) -> int:
        """Patches of all images of a pass with this number of tokens: a sequence has one screenshot per turn, or those
        of its window."""
        agent = self.recipe.agent
        if not agent.show_screenshots:
            return 0
        in_sequence = agent.window_screenshots if agent.context_mode == "window" else agent.max_turns
        in_context = max(1, agent.max_context_tokens // self.image_tokens)
        num_sequences = max(1, num_tokens // agent.max_context_tokens)
        if self.stage == "sft":  # short demonstrations fill a pass as well as long ones
            num_images = max(1, num_tokens // self.image_tokens)
        else:
            num_images = num_sequences * min(in_sequence, in_context)
        return num_images * self.image_tokens * self.shape.vision.patches_per_token

    def sharded(self, num_bytes: int) -> int:
        """A rank's part under FSDP2."""
        return -(-num_bytes // self.num_ranks)


def _state_items(sizes: _Sizes) -> Iterable[Item]:
    """Weights, gradients and optimiser state, on the GPU or offloaded to the host.

    training/optimizer.py keeps for each trained parameter a float32 master with a float32 gradient and two float32
    moments, in addition to the model's own weight and gradient: 16 bytes more than bfloat16's 2 + 2 (the accounting of
    Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1, with float32 gradients added). Float32 weights are
    their own masters.
    """
    b, trained = sizes.num_bytes, sizes.trained_parameters
    has_lora = sizes.recipe.trainer.lora is not None
    has_masters = b != FLOAT and not has_lora

    def state(name: str, how: str, num_bytes: int) -> Item:
        part = sizes.sharded(num_bytes)
        if sizes.is_offloaded:
            return Item(name=name, how=f"{how}; offloaded", host_bytes=part)
        return Item(name=name, how=how, gpu_bytes=part)

    parameters = sizes.shape.parameters
    yield state("weights", f"{parameters / 1e9:.2f} billion x {b} bytes", parameters * b)
    if has_lora:
        yield state("adapters", f"{trained / 1e6:.1f} million x {FLOAT} bytes", trained * FLOAT)
    gradient_bytes = FLOAT if has_lora else b
    yield state("gradients", f"{trained / 1e9:.3f} billion x {gradient_bytes} bytes", trained * gradient_bytes)
    if has_masters:
        yield state("master weights", "float32 copy of what is trained", trained * FLOAT)
        yield state("master gradients", "float32, accumulated over the passes of an update", trained * FLOAT)
    yield state("optimiser moments", "AdamW: two float32 numbers a parameter", trained * 2 * FLOAT)
    if sizes.has_reference:
        yield state("reference model", "frozen, as gspo.kl_coef is above 0", parameters * b)
    if sizes.num_ranks > 1:
        yield _fsdp_item(sizes)
    elif has_masters:
        # param.grad.float() of one parameter at a time, and the two gradients of a tied embedding while they are added.
        largest = sizes.shape.text.embedding_parameters
        yield Item(name="largest gradient", how="the embedding's, converted to float32", gpu_bytes=largest * FLOAT)


def _fsdp_item(sizes: _Sizes) -> Item:
    """The unsharded tensors of FSDP2: during a pass, the root group (embedding, norms, mergers) and two layers (the
    running one and the prefetched one); and the larger of the gradients that are being reduced (the root's, or those of
    two layers), in the model's dtype and, as they are summed, in float32 (Zhao et al. 2023, "PyTorch FSDP", arXiv
    2304.11277, sections 3.2 and 3.3)."""
    b, shape = sizes.num_bytes, sizes.shape
    gathered = b * (shape.root_parameters + 2 * shape.text.layer_parameters)
    reduced = 0
    if sizes.recipe.trainer.lora is None:
        reduced = (b + FLOAT) * max(shape.text.root_parameters, 2 * shape.text.layer_parameters)
    return Item(
        name="gathered by FSDP2",
        how="the root and two layers whole, and the gradients that are being summed",
        gpu_bytes=gathered + reduced,
    )


def _activation_items(sizes: _Sizes) -> Iterable[Item]:
    trainer, text, vision = sizes.recipe.trainer, sizes.shape.text, sizes.shape.vision
    tokens, b = sizes.pass_tokens, sizes.num_bytes
    layer = activations.text_layer_bytes(text, num_tokens=tokens, num_bytes=b)
    if trainer.lora is not None:
        layer = activations.lora_layer_bytes(text, trainer.lora, num_tokens=tokens, num_bytes=b)
    kept = activations.text_outside_bytes(text, num_tokens=tokens, num_bytes=b)
    if trainer.activation_checkpointing:
        kept += activations.text_checkpoint_bytes(text, num_tokens=tokens, num_bytes=b)
        yield Item(name="activations", how=f"layer inputs of {tokens:,} tokens", gpu_bytes=kept)
        yield Item(name="recomputed layer", how="one layer whole in the backward pass", gpu_bytes=layer)
    else:
        kept += text.num_layers * layer
        yield Item(name="activations", how=f"all layers of {tokens:,} tokens", gpu_bytes=kept)
    # A pass has no more response tokens than tokens; beyond a chunk they are processed in chunks.
    logits = activations.logits_bytes(text, num_tokens=tokens, num_bytes=b, max_chunk_logits=MAX_CHUNK_LOGITS)
    yield Item(name="logits", how="one chunk in float32, with its gradients", gpu_bytes=logits)
    # Scoring fills its passes up to the full budget, without gradients.
    scored = sizes.pass_patches(trainer.max_tokens_per_batch)
    if scored:
        how = f"{scored // vision.patches_per_token // sizes.image_tokens} of {sizes.image_tokens:,} tokens"
        images = activations.image_bytes(vision, num_patches=scored, num_bytes=b)
        yield Item(name="images", how=f"pixels and features: {how}", gpu_bytes=images)
        yield _vision_item(sizes, scored)


def _vision_item(sizes: _Sizes, scored: int) -> Item:
    """`scored`: patches of the longest pass without gradients."""
    trainer, vision, b = sizes.recipe.trainer, sizes.shape.vision, sizes.num_bytes
    frozen = activations.vision_forward_bytes(vision, num_patches=scored, num_bytes=b)
    if not trainer.train_vision:
        return Item(name="vision tower", how="one block at a time: it is frozen", gpu_bytes=frozen)
    patches = sizes.pass_patches(sizes.pass_tokens)
    block = activations.vision_block_bytes(vision, num_patches=patches, num_bytes=b)
    kept = activations.vision_outside_bytes(vision, num_patches=patches, num_bytes=b)
    if trainer.activation_checkpointing:
        kept += activations.vision_checkpoint_bytes(vision, num_patches=patches, num_bytes=b) + block
        return Item(name="vision tower", how="block inputs, and one block whole", gpu_bytes=max(kept, frozen))
    return Item(name="vision tower", how="all blocks", gpu_bytes=max(kept + vision.depth * block, frozen))


def _engine_items(sizes: _Sizes) -> Iterable[Item]:
    """The engine in the program's own process, on rank 0's GPU. Its slots stay allocated while the trainer updates."""
    if not sizes.has_engine:
        return
    recipe, b = sizes.recipe, sizes.num_bytes
    if not sizes.engine_shares_weights:
        yield Item(name="engine's weights", how="a copy of its own", gpu_bytes=sizes.shape.parameters * b)
    num_rows = min(recipe.engine.max_batch, recipe.rollout.max_concurrent_episodes or recipe.desktop.num_replicas)
    num_slots = min(max(MIN_SLOTS, recipe.engine.max_batch), max(MIN_SLOTS, 1 << (num_rows - 1).bit_length()))
    length = -(-recipe.agent.max_context_tokens // KV_GROWTH_TOKENS) * KV_GROWTH_TOKENS
    kv = kv_bytes(sizes.shape, num_tokens=length, num_bytes=b)
    yield Item(
        name="engine's keys and values",
        how=f"{num_slots} slots of {length:,} tokens, and image features",
        gpu_bytes=num_slots * kv + FEATURE_CACHE_BYTES,
    )
    is_kept = recipe.engine.reuse_kv_cache and recipe.agent.context_mode == "append"
    if is_kept and recipe.rollout.mode == "asynchronous":
        num_episodes = recipe.rollout.max_concurrent_episodes or recipe.desktop.num_replicas
        yield Item(
            name="episodes between turns",
            how=f"keys and values of {num_episodes} episodes; dropped if sampling runs out of memory",
            gpu_bytes=num_episodes * kv,
        )


def kv_bytes(shape: ModelShape, *, num_tokens: int, num_bytes: int) -> int:
    """Keys and values of one sequence: 2 x layers x width x tokens (Kwon et al. 2023, "PagedAttention", arXiv
    2309.06180, section 3)."""
    return 2 * shape.text.num_layers * shape.text.kv_size * num_tokens * num_bytes


def _checkpoint_item(sizes: _Sizes) -> Item:
    """A save copies each rank's masters and moments, and on rank 0 the full weights (under LoRA the adapters' factors),
    to host memory, and writes the copies while training continues (training/distributed_trainer.py). Loading needs
    less: a single rank reads the whole model, and each of several ranks its own weights one at a time
    (sharded_loading.py)."""
    trained, has_lora = sizes.trained_parameters, sizes.recipe.trainer.lora is not None
    has_masters = sizes.num_bytes != FLOAT and not has_lora
    weights = trained * FLOAT if has_lora else sizes.shape.parameters * sizes.num_bytes
    optimizer = trained * (3 if has_masters else 2) * FLOAT
    saving = weights + sizes.sharded(optimizer)
    return Item(name="a checkpoint", how="copies that are written while training continues", host_bytes=saving)


def _host_items(sizes: _Sizes) -> Iterable[Item]:
    """Host memory of each rank besides offloaded tensors."""
    recipe = sizes.recipe
    yield Item(name="program", how="Python, torch and CUDA's libraries (assumed)", host_bytes=PROGRAM_BYTES)
    yield _checkpoint_item(sizes)
    yield Item(name="pixel cache", how="decoded screenshots", host_bytes=PIXEL_CACHE_BYTES[sizes.stage])
    width, height = fit_size(recipe.desktop.screen_width, recipe.desktop.screen_height, recipe.agent.max_pixels)
    num_episodes = recipe.sft.batch_size
    if sizes.stage == "gspo":
        num_episodes = recipe.gspo.tasks_per_update * recipe.gspo.group_size
    num_images = num_episodes * recipe.agent.max_turns if recipe.agent.show_screenshots else 0
    yield Item(
        name="screenshots",
        how=f"{num_images:,} of an update, as stored",
        host_bytes=int(num_images * width * height * PNG_BYTES_PER_PIXEL),
    )
