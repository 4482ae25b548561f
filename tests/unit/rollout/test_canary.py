"""The canary: a response that is sampled for comparison where all tokens of an update are older than its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_samples import Conversation, Noise, engine_model

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.canary import needs_canary, sample_canary
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.objective.score import score_trajectories

SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=12, stop=(), seed=3)


@pytest.fixture
def stale(renderer: Renderer, noise_png: Noise) -> Trajectory:
    """Two turns with a screenshot each, sampled by the weights after 4 updates."""
    talk = Conversation(renderer, noise_png, "e1")
    first = talk.ask("hello")
    talk.receive(GenerateResult(text="", policy_version=4, finish_reason="stop", token_ids=(7, 8), logprobs=(0.0, 0.0)))
    second = talk.ask("go on")
    ids = (*second.token_ids, 9)
    mask = [0] * len(ids)
    for place in (len(first.token_ids), len(first.token_ids) + 1, len(ids) - 1):
        mask[place] = 1
    return Trajectory(
        trajectory_id="e1",
        task_id="t",
        token_ids=ids,
        response_mask=tuple(mask),
        images=second.images,
        sampled_logprobs=(0.0,) * len(ids),
        policy_versions=tuple(4 if is_on else -1 for is_on in mask),
        advantage=1.0,
    )


def test_a_canary_is_needed_if_no_token_that_is_trained_on_was_sampled_with_the_updates_weights(stale: Trajectory):
    replay = replace(stale, sampled_logprobs=None, policy_versions=None)
    assert needs_canary([stale], update=5)
    assert needs_canary([replay], update=5)
    assert not needs_canary([stale], update=4)
    assert not needs_canary([stale, replace(stale, policy_versions=None)], update=5)
    assert not needs_canary([replace(stale, advantage=0.0)], update=5)
    assert not needs_canary([], update=5)


async def test_a_canary_shows_the_screenshots_of_a_first_prompt_and_scores_as_the_trainer_does(
    tiny_folder: Path, processor: Any, stale: Trajectory
):
    model = engine_model(tiny_folder)
    engine = TransformersEngine(model, processor, timeout_s=30, policy_version=5)
    canary = await sample_canary(
        [stale], update=5, generate=engine.generate, sampling=SAMPLING, image_id=Renderer(processor).image_id
    )
    await engine.close()
    assert canary.is_canary
    assert (canary.advantage, canary.temperature) == (0.0, 0.7)
    assert tuple(canary.images) == tuple(stale.images[:1])
    start = canary.response_mask.index(1)
    assert canary.token_ids[:start] == stale.token_ids[:start]
    (own,) = score_trajectories(model, processor, [canary])
    assert canary.sampled_logprobs is not None
    assert own.tolist() == pytest.approx(list(canary.sampled_logprobs), abs=1e-4)
    assert any(own[start:])


@pytest.mark.parametrize("versions", [(4,), (5, 6)])
async def test_a_canary_of_other_weights_is_an_error(stale: Trajectory, renderer: Renderer, versions: tuple[int, ...]):
    async def generate(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(
            text="",
            policy_version=versions[0],
            policy_versions=versions if len(versions) > 1 else (),
            finish_reason="stop",
            token_ids=(7,) * len(versions),
            logprobs=(-1.0,) * len(versions),
        )

    with pytest.raises(EngineError, match=r"update 6: the engine sampled its canary with the weights after \[.*\]"):
        await sample_canary(
            [stale], update=5, generate=generate, sampling=SAMPLING, image_id=renderer.image_id
        )  # fmt: skip
