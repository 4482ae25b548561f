"""Sampler and trainer together: the trainer trains on exactly what the engine samples, and reward goes up."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from osworld_pipeline.agent.context import AppendContext
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection, TinyModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.advantage import compute_advantages
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.update import GspoTrainer

SPEC = TinyModelSection(
    kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=400
)
GROUP_SIZE = 8
NUM_TURNS = 2


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 90, 200)).save(buffer, format="PNG")
    return buffer.getvalue()


async def sample_episode(engine: TransformersEngine, renderer: Renderer, name: str, seed: int) -> Trajectory:
    """Two turns of a few tokens, each after a picture, as a rollout would record them."""
    context = AppendContext(renderer, "You operate a computer.", max_tokens=512, max_new_tokens=4)
    images: tuple[bytes, ...] = ()
    for turn in range(NUM_TURNS):
        image = prepare_screenshot(picture(60 * turn), 64 * 64)
        assert context.add_observation(f"[Task]\nGo {turn}", image) is None
        sampling = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=4, seed=seed * 10 + turn)
        request = context.request(sampling, episode_id=name)
        images = request.images
        context.add_response(await engine.generate(request))
    (sequence,) = context.sequences
    return Trajectory(
        trajectory_id=name,
        task_id="task",
        token_ids=sequence.token_ids,
        response_mask=sequence.response_mask,
        images=images,
        sampled_logprobs=sequence.sampled_logprobs,
        policy_versions=sequence.policy_versions,
    )


def share_of_even_ids(trajectory: Trajectory) -> float:
    ids = [token for token, sampled in zip(trajectory.token_ids, trajectory.response_mask, strict=True) if sampled]
    return sum(token % 2 == 0 for token in ids) / len(ids)


@pytest.mark.slow
async def test_reward_rises_and_trainer_and_sampler_agree_at_every_update(tmp_path: Path):
    torch.set_num_threads(1)
    build_tiny_checkpoint(tmp_path / "model", SPEC, ["You operate a computer. Go 0 1 Task"])
    processor, model = load_processor(tmp_path / "model"), load_model(tmp_path / "model")
    renderer, engine = Renderer(processor), TransformersEngine(model, processor)
    settings = GspoSharedSection(
        learning_rate=5e-3, clip_low=0.05, clip_high=0.05, kl_coef=0.01, minibatches_per_update=1, micro_batch_size=8,
        max_grad_norm=1.0, max_logprob_diff=1e-3,
    )  # fmt: skip
    trainer = GspoTrainer(model, processor, settings, reference=load_model(tmp_path / "model", is_frozen=True))
    means: list[float] = []
    try:
        for update in range(30):
            episodes = [
                await sample_episode(engine, renderer, f"u{update}-s{index}", update * 100 + index)
                for index in range(GROUP_SIZE)
            ]
            rewards = [share_of_even_ids(episode) for episode in episodes]
            means.append(sum(rewards) / len(rewards))
            metrics = trainer.update(
                [
                    Trajectory(**{**vars(episode), "advantage": advantage})
                    for episode, advantage in zip(episodes, compute_advantages(rewards), strict=True)
                ]
            )
            assert trainer.num_updates == update + 1
            assert metrics["trainer_sampler_logprob_diff"] < 1e-4
            engine.mark_updated(policy_version=update + 1)
    finally:
        await engine.close()
    assert sum(means[:3]) / 3 < 0.65
    assert sum(means[-5:]) / 5 > 0.75
