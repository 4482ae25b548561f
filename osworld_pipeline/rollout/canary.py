"""A canary: one response sampled with the trainer's current weights. It is added to an update whose tokens are all
older, so that trainer and sampler are compared before every update."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.attempt import derive_seed

Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]
MAX_TOKENS = 64


def needs_canary(trajectories: Sequence[Trajectory], *, update: int) -> bool:
    """Whether a trajectory has an advantage other than 0, and none has a token that was sampled by the weights after
    `update` updates."""
    return any(trajectory.advantage for trajectory in trajectories) and not any(
        trajectory.sampled_logprobs is not None
        and (trajectory.policy_versions is None or update in trajectory.policy_versions)
        for trajectory in trajectories
    )


async def sample_canary(
    trajectories: Sequence[Trajectory], *, update: int, generate: Generate, sampling: SamplingParams, image_id: int
) -> Trajectory:
    """A response to the shortest first prompt among these, with its screenshots. `image_id`: id of the image
    placeholder.

    Raises:
        EngineError: the engine fails, or samples with other weights than those after `update` updates.
    """
    source = min(trajectories, key=lambda one: (one.response_mask.index(1), one.trajectory_id))
    prompt = source.token_ids[: source.response_mask.index(1)]
    num_images = sum(
        token_id == image_id and (index == 0 or prompt[index - 1] != image_id) for index, token_id in enumerate(prompt)
    )
    name = f"canary-u{update:04d}"
    request = GenerateRequest(
        sampling=replace(
            sampling,
            max_new_tokens=min(MAX_TOKENS, sampling.max_new_tokens),
            seed=derive_seed(sampling.seed, f"{name}:{source.trajectory_id}"),
        ),
        token_ids=prompt,
        images=tuple(source.images[:num_images]),
    )
    result = await generate(request)
    versions = {result.policy_version, *result.policy_versions}
    if versions != {update}:
        raise EngineError(
            f"update {update + 1}: the engine sampled its canary with the weights after {sorted(versions)} updates, "
            "not with those that were loaded into it: check that all its servers load weights, and run again"
        )
    outside = (0,) * len(prompt)
    return Trajectory(
        trajectory_id=name,
        task_id=source.task_id,
        token_ids=(*prompt, *result.token_ids),
        response_mask=(*outside, *(1,) * len(result.token_ids)),
        images=request.images,
        sampled_logprobs=(*(0.0,) * len(prompt), *result.logprobs),
        temperature=sampling.temperature or 1.0,
        is_canary=True,
    )
