"""Combinations of keys that a recipe may not have, as data: refused on load, and listed in the documentation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from osworld_pipeline.recipes.engine_names import OPENAI, OURS, SGLANG

if TYPE_CHECKING:
    from osworld_pipeline.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    sentence: str
    """The rule that such a recipe breaks, with its reason or remedy if not obvious."""
    is_met: Callable[["Recipe"], bool]
    """Whether a recipe has this contradiction."""


def first_contradiction(recipe: "Recipe") -> str | None:
    return next((one.sentence for one in CONTRADICTIONS if one.is_met(recipe)), None)


CONTRADICTIONS = (
    Contradiction(
        sentence="agent.max_response_tokens must be smaller than agent.max_context_tokens",
        is_met=lambda recipe: recipe.agent.max_response_tokens >= recipe.agent.max_context_tokens,
    ),
    Contradiction(
        sentence="gspo.minibatches_per_update must not exceed the episodes of an update (group_size times "
        "tasks_per_update)",
        is_met=lambda recipe: (
            recipe.gspo.minibatches_per_update > recipe.gspo.group_size * recipe.gspo.tasks_per_update
        ),
    ),
    Contradiction(
        sentence="rollout.min_valid_episodes must not exceed gspo.group_size: no group could ever be complete",
        is_met=lambda recipe: recipe.rollout.min_valid_episodes > recipe.gspo.group_size,
    ),
    Contradiction(
        sentence="gspo.top_p must be 1: below it tokens are sampled from a nucleus that is not recorded, so that the "
        "trainer cannot compute the distribution that sampled them",
        is_met=lambda recipe: recipe.gspo.top_p < 1,
    ),
    Contradiction(
        sentence='gspo.old_logprobs "sampler" needs gspo.importance "none": the ratio to the sampler already '
        "includes the difference between sampler and trainer",
        is_met=lambda recipe: recipe.gspo.old_logprobs == "sampler" and recipe.gspo.importance != "none",
    ),
    Contradiction(
        sentence="gspo.importance_low must be below gspo.importance_high",
        is_met=lambda recipe: recipe.gspo.importance_low >= recipe.gspo.importance_high,
    ),
    Contradiction(
        sentence='replay.require_verified needs replay.verify = "all"',
        is_met=lambda recipe: recipe.replay.require_verified and recipe.replay.verify != "all",
    ),
    Contradiction(
        sentence="trainer.max_tokens_per_batch must not be below agent.max_context_tokens",
        is_met=lambda recipe: recipe.trainer.max_tokens_per_batch < recipe.agent.max_context_tokens,
    ),
    Contradiction(
        sentence="trainer.context_parallel must be 1: the image tokens of one sequence cannot be split over ranks; "
        "lower agent.max_context_tokens or raise trainer.num_processes",
        is_met=lambda recipe: recipe.trainer.context_parallel > 1,
    ),
    Contradiction(
        sentence="trainer.lora trains adapters of the language model only: trainer.train_vision must be false",
        is_met=lambda recipe: recipe.trainer.lora is not None and recipe.trainer.train_vision,
    ),
    Contradiction(
        sentence='engine.kind "sglang" needs engine.urls or engine.launch, and "openai" needs engine.urls',
        is_met=lambda recipe: (
            recipe.engine.kind in (SGLANG, OPENAI) and not recipe.engine.urls and recipe.engine.launch is None
        ),
    ),
    Contradiction(
        sentence="engine.options are read by engines of other distributions: with one of ours they must be empty",
        is_met=lambda recipe: bool(recipe.engine.options) and recipe.engine.kind in OURS,
    ),
    Contradiction(
        sentence='engine.launch starts sglang servers: it needs engine.kind "sglang", and no engine.urls',
        is_met=lambda recipe: (
            recipe.engine.launch is not None and (recipe.engine.kind != "sglang" or bool(recipe.engine.urls))
        ),
    ),
    Contradiction(
        sentence='engine.weights "broadcast" and "upload" are for sglang servers: they need engine.kind "sglang"',
        is_met=lambda recipe: recipe.engine.weights != "folder" and recipe.engine.kind != "sglang",
    ),
    Contradiction(
        sentence='engine.weights must not be "broadcast" with trainer.lora: sglang servers read adapters from a folder',
        is_met=lambda recipe: recipe.engine.weights == "broadcast" and recipe.trainer.lora is not None,
    ),
    Contradiction(
        sentence='engine.kind "openai" needs engine.model, the name of the model at that endpoint',
        is_met=lambda recipe: recipe.engine.kind == "openai" and not recipe.engine.model,
    ),
)
