"""The trainer's forward pass: log-probabilities (and entropies) of a batch's response tokens.

Shapes: B sequences, T tokens, R rows and L positions of the batch's layout, N response tokens, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from osworld_pipeline.agent.logits import project_logits
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.training.batch import Batch, build_batch
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.micro_batches import make_micro_batches
from osworld_pipeline.training.objective.loss import token_logprobs

MAX_TOKENS = 16_384
"""Default limit of a pass."""
FORWARD_METHOD = "response_logprobs"


@dataclass(frozen=True, kw_only=True)
class Scores:
    logprobs_BT: torch.Tensor
    """log p(token at t | tokens before t) at the batch's temperatures and without its banned ids, float32; 0 outside
    the response mask."""
    entropy_BT: torch.Tensor
    """Zeros if not requested."""


def score_responses(model: Any, batch: Batch, *, with_entropy: bool = False) -> Scores:
    """One forward pass; logits are computed only at response tokens."""
    logprobs_N, entropy_N = getattr(model, FORWARD_METHOD, MethodType(response_logprobs, model))(batch, with_entropy)
    mask_BT = batch.response_mask_BT
    zeros_BT = torch.zeros(mask_BT.shape, dtype=logprobs_N.dtype, device=logprobs_N.device)
    return Scores(
        logprobs_BT=zeros_BT.masked_scatter(mask_BT, logprobs_N),
        entropy_BT=zeros_BT.masked_scatter(mask_BT, entropy_N),
    )


def add_forward_method(model: Any) -> None:
    """Adds the method through which a sharded model must be called."""
    setattr(model, FORWARD_METHOD, MethodType(response_logprobs, model))


def response_logprobs(model: Any, batch: Batch, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the N response tokens, sequence by sequence."""
    hidden_RLD = _hidden_states(model, batch)
    mask_RL = batch.response_mask_RL
    # The hidden state at t - 1 predicts the token at t; no sequence begins with a response.
    logprobs_N, entropy_N = token_logprobs(
        hidden_RLD[:, :-1][mask_RL[:, 1:]],
        batch.input_ids_RL[mask_RL],
        partial(project_logits, model.lm_head),
        vocab_size=model.config.text_config.vocab_size,
        with_entropy=with_entropy,
        temperature_N=batch.temperature_N,
        banned_ids=batch.banned_ids,
    )
    return logprobs_N.clone(), entropy_N.clone()  # FSDP2 adds hooks to the outputs, which fails for views


def _hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """The language model's last hidden states.

    Padding is on the right and attention is causal, so no real token attends to padding: omitting the attention mask
    changes nothing and halves the attention's work.
    """
    core = model.model
    extra: dict[str, Any] = {}
    if batch.packed_lengths is not None:
        extra["packed_lengths"] = batch.packed_lengths
    if batch.pixel_values is not None:
        extra["mm_encoder_outputs"] = {"image": _image_features(core, batch)}
    return core(
        input_ids=batch.input_ids_RL, position_ids=batch.position_ids_3RL, use_cache=False, **extra
    ).last_hidden_state


def _image_features(core: Any, batch: Batch) -> Any:
    """Each distinct image is encoded once and its features are repeated at each occurrence; a frozen tower keeps no
    activations for a backward pass."""
    is_trained = any(param.requires_grad for param in core.visual.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        features = core.get_image_features(batch.pixel_values, batch.image_grid_U3, return_dict=True)
    features.pooler_output = [features.pooler_output[index] for index in batch.image_index_I]
    features.deepstack_features = [
        [layer[index] for index in batch.image_index_I] for layer in features.deepstack_features
    ]
    return features


def banned_ids_of(model: Any, processor: Any) -> tuple[int, ...]:
    """Ids that this model's samplers never sample."""
    return Renderer(processor).banned_ids(model.config.text_config.vocab_size)


def device_of(model: Any) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def score_trajectories(
    model: Any,
    processor: Any,
    trajectories: Sequence[Trajectory],
    *,
    cache: PixelCache | None = None,
    max_tokens: int = MAX_TOKENS,
    max_sequences: int | None = None,
    is_packed: bool = False,
    process_group: ProcessGroup | None = None,
    before_pass: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """Log-probabilities of each trajectory's tokens under the sampling distribution: at the trajectory's temperature,
    without the banned ids. Aligned with its token_ids, on the CPU; no gradients. The ranks share the work, and each
    gets all results. `before_pass`: called before each pass, the same number of times on every rank.

    Raises:
        TrainingError: a trajectory is malformed or has more than `max_tokens` tokens; names it.
    """
    process_group = process_group or ProcessGroup.alone(device_of(model))
    banned_ids = banned_ids_of(model, processor)
    index_of = {id(trajectory): index for index, trajectory in enumerate(trajectories)}
    own: dict[int, torch.Tensor] = {}
    rounds = make_micro_batches(
        trajectories,
        num_ranks=process_group.world_size,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        is_packed=is_packed,
    )
    for micro_batches in rounds:
        if before_pass is not None:
            before_pass()
        micro_batch = micro_batches[process_group.rank]
        batch = build_batch(
            processor,
            micro_batch.trajectories,
            cache=cache,
            device=process_group.device,
            is_packed=is_packed,
            banned_ids=banned_ids,
        )
        logprobs_BT = score_responses(model, batch).logprobs_BT.cpu()
        if not micro_batch.is_dummy:
            for row, trajectory in enumerate(micro_batch.trajectories):
                own[index_of[id(trajectory)]] = logprobs_BT[row, : len(trajectory.token_ids)]
    if isinstance(model, FSDPModule):
        model.reshard()
    everyones = {index: row for part in process_group.gather(own) for index, row in part.items()}
    return [everyones[index] for index in range(len(trajectories))]


@contextmanager
def training_mode(model: Any, *, dropout_seed: int | None = None) -> Iterator[None]:
    """Enables activation recomputation and dropout, which are only for passes with gradients. Dropout is determined by
    the seed, so there is no random state to save."""
    model.train()
    is_cuda = device_of(model).type == "cuda"
    try:
        with torch.random.fork_rng(devices=[device_of(model)] if is_cuda else [], enabled=dropout_seed is not None):
            if dropout_seed is not None:
                torch.manual_seed(dropout_seed)
            yield
    finally:
        model.eval()
