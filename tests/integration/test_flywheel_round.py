"""A round of the flywheel with a real trainer and episodes that were rolled out before: what is kept, what is trained
on, and what is found again. No desktop is needed, because a graded episode is never run twice."""

import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from episode_samples import make_episode, make_sequence, make_step
from PIL import Image

from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer, render_demonstration
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.base import make_base
from osworld_pipeline.runs.checkpoints.ids import read_checkpoint
from osworld_pipeline.runs.flywheel import flywheel
from osworld_pipeline.runs.flywheel.plan import FlywheelJob, Measurement, read_measurement
from osworld_pipeline.runs.job import Policy, StageJob
from osworld_pipeline.runs.messages import Message, Metrics, Warned
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.training.weights.checkpoint import read_trainer_state

pytestmark = pytest.mark.slow

ROUND = "flywheel-000000000001"
RECIPE = load_recipe(
    "smoke",
    settings=[
        "model.hidden_size=32",
        "model.num_layers=1",
        "model.vision_hidden_size=32",
        "model.vocab_size=400",
        "flywheel.num_rounds=1",
        "flywheel.samples_per_task=2",
        "flywheel.num_updates=2",
        "flywheel.with_demonstrations=false",
        "trainer.num_threads=1",
    ],
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with a base checkpoint; tests copy nothing of it but read its weights."""
    root = tmp_path_factory.mktemp("base")
    job = StageJob(recipe=RECIPE, state_root=root, stage=Stage.BASE, checkpoint_id="base-1", data_digest="d")
    make_base.main(job, lambda message: None)
    return root / "checkpoints" / "base-1"


def task_row(name: str) -> dict[str, Any]:
    config = {"id": name, "instruction": f"Do {name}.", "evaluator": {"func": "exact_match"}}
    return {"task_id": name, "domain": "os", "task_config": orjson.dumps(config).decode()}


def roll_out(state: StateDir, base: Path, rewards: dict[str, Reward | None]) -> None:
    """Writes each episode as a separate part, as a killed round leaves them. A reward of None is a fault."""
    store, renderer = TrajectoryStore(state), Renderer(load_processor(base))
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 60, 200)).save(buffer, format="PNG")
    image = buffer.getvalue()
    sha256 = store.write_blob(image, suffix="png")
    for number, (name, reward) in enumerate(rewards.items()):
        turns = [system_message("s"), user_message("[Task]\nDo it"), assistant_message(f"Action: {number}")]
        rendered = render_demonstration(renderer, turns, [image])
        sequence = make_sequence(
            token_ids=rendered.token_ids,
            response_mask=rendered.mask,
            sampled_logprobs=(-0.5,) * len(rendered.token_ids),
            policy_versions=(0,) * len(rendered.token_ids),
            image_steps=(0,),
        )
        store.write_episodes(name, [episode(name, reward, sha256, sequence, renderer.processor_digest)])


def episode(name: str, reward: Reward | None, sha256: str, sequence: Any, digest: str) -> Episode:
    is_success = reward is not None and reward.task >= 0.5
    return make_episode(
        name,
        purpose=EpisodePurpose.TRAIN,
        task_id=f"t{name.split('-g')[1][:2]}",
        outcome=Outcome.ENV_FAULT if reward is None else Outcome.SUCCESS if is_success else Outcome.FAILURE,
        reward=reward,
        steps=(make_step(0, sha256=sha256),),
        sequences=(sequence,),
        processor_digest=digest,
        stage_key=ROUND,
        update=0,
    )


def job(state: StateDir, base: Path, *, recipe: Recipe = RECIPE, previous: Measurement | None = None) -> FlywheelJob:
    return FlywheelJob(
        recipe=recipe,
        state_root=state.root,
        stage=Stage.FLYWHEEL,
        checkpoint_id=ROUND,
        parent=Policy(checkpoint_id="sft-1", path=str(base)),
        data_digest="d",
        servers=EnvServers(urls=("http://127.0.0.1:9",), token=None, num_replicas=1),
        previous=previous,
    )


REWARDS: dict[str, Reward | None] = {
    f"{ROUND}-u0000-g00-s00": Reward(task=1.0, shaped=0.1),
    f"{ROUND}-u0000-g00-s01": Reward(task=0.0, shaped=1.0),
    f"{ROUND}-u0000-g01-s00": Reward(task=0.5, shaped=0.2),
    f"{ROUND}-u0000-g01-s01": Reward(task=0.49, shaped=1.0),
}


@pytest.fixture
def state(tmp_path: Path, base: Path) -> StateDir:
    state = StateDir(tmp_path)
    write_table(state, "train_tasks", [task_row("t00"), task_row("t01")])
    roll_out(state, base, REWARDS)
    return state


def test_a_round_trains_on_rewarded_episodes_and_leaves_a_checkpoint_with_its_measurement(
    state: StateDir, base: Path
) -> None:
    messages: list[Message] = []
    flywheel.main(job(state, base), messages.append)
    made = read_checkpoint(state, ROUND)
    assert made is not None
    assert (made.stage, made.parent_id, made.num_updates) == (Stage.FLYWHEEL, "sft-1", 2)
    assert made.metrics["num_kept"] == 2, "by raw task reward: the shaped one would have kept the other two"
    assert made.metrics["flywheel_success_rate"] == 0.5
    kept = read_trainer_state(state.root / made.path)
    assert kept.recipe["sources"]["flywheel.num_rounds"] == "command line", "the recipe says where its values came from"
    groups = TrajectoryStore(state).existing_parts("rollout_groups")
    assert groups == [ROUND]
    measured = read_measurement(state, ROUND, threshold=0.5)
    assert measured is not None
    assert (measured.num_kept, measured.num_valid) == (2, 4)
    assert next(message for message in messages if isinstance(message, Metrics)).metrics["num_kept"] == 2

    again = flywheel.main(job(state, base), messages.append)
    assert again["weights_digest"] == made.weights_digest, "a finished round is found"


def test_a_round_that_measured_no_gain_stops_without_a_checkpoint(state: StateDir, base: Path) -> None:
    previous = Measurement(num_valid=4, num_kept=3, num_episodes=4)
    messages: list[Message] = []
    assert flywheel.main(job(state, base, previous=previous), messages.append) == {}
    assert read_checkpoint(state, ROUND) is None
    assert read_measurement(state, ROUND, threshold=0.5) is not None, "its measurement stays"
    (warning,) = [message.message for message in messages if isinstance(message, Warned)]
    assert warning.startswith("the flywheel stops: the success rate went from 75.0% to 50.0%; ")
