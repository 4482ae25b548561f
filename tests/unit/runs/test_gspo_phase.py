"""A GSPO phase whose episodes and trainer are told in a line each: synchronous, a kill anywhere changes nothing of what
is learned and recorded; asynchronous, nothing is lost, counted twice or older than it may be."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import (
    Episode,
    Outcome,
    Reward,
    Step,
    StepSignals,
    TokenSequence,
)
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError, EnvServerError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.rollout.utilisation import BusyMeter, Utilisation
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.gspo_engine import PhaseRollouts
from osworld_pipeline.runs.gspo_job import GspoJob, resume_point
from osworld_pipeline.runs.stages import read_checkpoint
from osworld_pipeline.runs.train_gspo import train_phase
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.training.checkpoint import write_documents, writing_folder
from osworld_pipeline.trajectories import TrajectoryStore

NUM_UPDATES = 4
TASKS_PER_UPDATE = 2
STAGE = "gspo_phase1-test"


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Fuse:
    """Kills at the nth time that somebody passes a place."""

    place: str = ""
    count: int = 0
    passed: Counter[str] = field(default_factory=Counter)

    def pass_by(self, place: str) -> None:
        self.passed[place] += 1
        if place == self.place and self.passed[place] == self.count:
            raise Killed


class ChainTrainer:
    """Its weights are a digest of everything it was ever trained on, in order."""

    def __init__(self, folder: Path, num_updates: int, fuse: Fuse) -> None:
        saved = folder / "weights.json"
        self.num_updates = num_updates
        self.weights_digest: str = json.loads(saved.read_text()) if saved.is_file() else "fresh"
        self.seen: list[tuple[int, Sequence[Trajectory]]] = []
        self._fuse = fuse

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        self._fuse.pass_by("update")
        self.seen.append((self.num_updates, trajectories))
        told = [(one.trajectory_id, round(one.advantage, 6), one.policy_versions) for one in trajectories]
        self.weights_digest = digest_json([self.weights_digest, told])
        self.num_updates += 1
        return {"loss": 0.0}

    def save(self, folder: Path, documents: Any, *, then: Callable[[Path], object] | None = None) -> None:
        self._fuse.pass_by("save")
        with writing_folder(folder) as temp:
            (temp / "weights.json").write_text(json.dumps(self.weights_digest))
            (temp / "model.safetensors").write_text(self.weights_digest)
            write_documents(temp, documents)
        if then is not None:
            then(folder)
        self._fuse.pass_by("saved")

    def wait_saved(self) -> None: ...

    def close(self) -> None: ...


class ChainEngine:
    """Episodes that depend on seed and weights alone; as long as they are told to be."""

    def __init__(self, trainer: ChainTrainer, fuse: Fuse, *, fault: Outcome | None = None) -> None:
        self.version, self.weights = trainer.num_updates, trainer.weights_digest
        self._trainer = trainer
        self._fuse = fuse
        self._fault = fault

    async def hand_over(self, policy_version: int) -> None:
        self.version, self.weights = policy_version, self._trainer.weights_digest

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
        self._fuse.pass_by("episode")
        versions = []
        for _ in range(2):
            versions.append(self.version)
            await asyncio.sleep(0.001 * (plan.seed % 4))
        luck = int(digest_json([plan.seed, self.weights])[:4], 16) / 0xFFFF
        outcome = self._fault or (Outcome.SUCCESS if luck > 0.5 else Outcome.FAILURE)
        tokens = TokenSequence(
            token_ids=(1, 2, 3),
            response_mask=(0, 1, 1),
            sampled_logprobs=(0.0, -1.0, -luck),
            policy_versions=(-1, *versions),
            image_steps=(),
        )
        return Episode(
            episode_id=plan.episode_id,
            task_id=task.task_id,
            task_digest=task.config_digest,
            purpose=plan.purpose,
            checkpoint_id=plan.checkpoint_id,
            engine="chain",
            sampling=plan.sampling,
            outcome=outcome,
            error=None if outcome.is_valid else "it is down",
            reward=Reward(task=float(outcome is Outcome.SUCCESS), shaped=luck) if outcome.is_valid else None,
            steps=tuple(make_step(index, version) for index, version in enumerate(versions)),
            sequences=(tokens,),
            group_id=plan.group_id,
            seed=plan.seed,
            stage_key=plan.stage_key,
            update=plan.update,
        )


class FusedStore(TrajectoryStore):
    def __init__(self, state: StateDir, fuse: Fuse) -> None:
        super().__init__(state)
        self._fuse = fuse

    def write_groups(self, part: str, groups: Any, injections: Any) -> None:
        self._fuse.pass_by("write")
        super().write_groups(part, groups, injections)
        self._fuse.pass_by("written")


def make_step(index: int, version: int) -> Step:
    return Step(
        step_index=index,
        screenshot_sha256="a" * 64,
        screenshot_width=32,
        screenshot_height=32,
        screenshot_format="png",
        screenshot_num_bytes=10,
        observation_text="o",
        response_text="r",
        action=None,
        command=None,
        signals=StepSignals(action_type="wait", action_parsed=True, action_executed=True),
        policy_version=version,
        prompt_num_tokens=1,
        response_num_tokens=1,
        model_s=0.0,
        step_s=0.0,
    )


def recipe_of(**rollout: Any) -> Recipe:
    fields = load_recipe("smoke").model_dump(mode="json")
    fields["gspo"] |= {"group_size": 4, "tasks_per_update": TASKS_PER_UPDATE}
    fields["gspo"]["phase1"]["num_updates"] = NUM_UPDATES
    fields["rollout"] |= {"max_concurrent_episodes": 6, **rollout}
    return Recipe.model_validate(fields)


def job_of(root: Path, recipe: Recipe) -> GspoJob:
    state = StateDir(root)
    rows = [
        {"task_id": f"t{index}", "domain": "os", "task_config": json.dumps(config)}
        for index, config in enumerate(
            {"id": f"t{index}", "instruction": "Do it.", "evaluator": {"func": "exact_match"}} for index in range(5)
        )
    ]
    write_table(state, "train_tasks", rows)
    return GspoJob(
        recipe=recipe,
        phase=recipe.gspo.phase1,
        stage=Stage.GSPO_PHASE1,
        state=state,
        checkpoint_id=STAGE,
        parent_id="sft-x",
        parent_folder=root / "parent",
        data_digest="d",
        servers=EnvServers(urls=("http://127.0.0.1:1",), token=None, num_replicas=2),
        run_ids={},
    )


@dataclass
class Ran:
    trainer: ChainTrainer
    metrics: dict[int, Mapping[str, float]]
    result: Mapping[str, Any]


def run_phase(
    job: GspoJob, processor: Any, fuse: Fuse | None = None, *, fault: Outcome | None = None, is_killed: bool = False
) -> Ran:
    """A process of its own, as far as the phase can tell: begins at what is on disk, and may be killed."""
    fuse = fuse or Fuse()
    point = resume_point(job)
    trainer: Any = ChainTrainer(point.folder, point.num_updates, fuse)
    engine = ChainEngine(trainer, fuse, fault=fault)
    metrics: dict[int, Mapping[str, float]] = {}
    result: dict[str, Any] = {}

    def report(message: Mapping[str, Any]) -> None:
        if message["kind"] == "metrics":
            metrics[message["update"]] = message["metrics"]

    async def run() -> None:
        rollouts = PhaseRollouts(
            run_one=engine.run_episode,
            handover=engine.hand_over,
            store=FusedStore(job.state, fuse),
            renderer=Renderer(processor),
            utilisation=Utilisation(environments=BusyMeter(2)),
        )
        with ThreadPoolExecutor(1) as thread:
            result.update(await train_phase(job, rollouts, trainer, thread, point, report))
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"

    if is_killed:
        with pytest.raises(Killed):
            asyncio.run(run())
    else:
        asyncio.run(run())
    return Ran(trainer, metrics, result)


def recorded(job: GspoJob) -> dict[str, list[Episode]]:
    """What the store holds, by part."""
    store = TrajectoryStore(job.state)
    parts = store.existing_parts("episodes")
    return {part: list(episodes) for part, episodes in store.read_parts(parts).items() if episodes}


def without_times(found: Mapping[str, Sequence[Episode]]) -> dict[str, list[Episode]]:
    return {part: [replace(one, times_s={}, started_at=0.0) for one in episodes] for part, episodes in found.items()}


PLACES = [("episode", 1), ("episode", 13), ("write", 2), ("written", 3), ("update", 3), ("save", 2), ("saved", 3)]


@pytest.mark.parametrize(("place", "count"), PLACES)
@pytest.mark.parametrize("save_every", [1, 3])
def test_synchronous_a_kill_changes_nothing_of_what_is_learned_and_recorded(
    tmp_path: Path, processor: Any, place: str, count: int, save_every: int
) -> None:
    if save_every > 1 and place in ("save", "saved"):
        count = 1
    recipe = recipe_of(zero_variance="top_up")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": save_every})})
    straight, killed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "killed", recipe)
    whole = run_phase(straight, processor)
    run_phase(killed, processor, Fuse(place, count), is_killed=True)
    assert read_checkpoint(killed.state, STAGE) is None
    resumed = run_phase(killed, processor)
    assert resumed.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(killed)) == without_times(recorded(straight))
    assert len(recorded(killed)) == NUM_UPDATES
    checkpoint = read_checkpoint(killed.state, STAGE)
    assert checkpoint is not None
    assert checkpoint.num_updates == NUM_UPDATES


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_asynchronous_a_kill_loses_no_group_and_counts_none_twice(
    tmp_path: Path, processor: Any, place: str, count: int
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=1))
    run_phase(job, processor, Fuse(place, count), is_killed=True)
    first = run_phase(job, processor)
    assert {update for update, _ in first.trainer.seen} == set(range(NUM_UPDATES - len(first.metrics), NUM_UPDATES))
    for update, trajectories in first.trainer.seen:
        versions = [version for one in trajectories for version in one.policy_versions or () if version >= 0]
        assert all(update - 1 <= version <= update for version in versions)
    found = recorded(job)
    assert set(found) == {f"{STAGE}-u{update:04d}" for update in range(NUM_UPDATES)}
    ids = Counter(one.episode_id for episodes in found.values() for one in episodes)
    assert set(ids.values()) == {1}
    groups = {one.group_id for episodes in found.values() for one in episodes}
    assert groups == {f"{STAGE}-g{serial:06d}" for serial in range(len(groups))}
    assert all(one.update == int(part[-4:]) for part, episodes in found.items() for one in episodes)


def test_what_was_recorded_beyond_the_checkpoint_is_taken_back_before_anything_is_rolled_out(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(mode="asynchronous")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": 2})})
    job = job_of(tmp_path, recipe)
    run_phase(job, processor, Fuse("update", 4), is_killed=True)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(4)}
    run_phase(job, processor, Fuse("episode", 1), is_killed=True)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(2)}


SPENT = {
    "retraining.max_wall_s": Budget(deadline=time.time() - 1),
    "retraining.max_episodes": Budget(episodes=1),
    "retraining.max_tokens": Budget(tokens=16),
}
"""Each is spent by one update of eight episodes with two tokens each."""


@pytest.mark.parametrize("key", SPENT)
@pytest.mark.parametrize("save_every", [1, 3])
def test_a_spent_budget_leaves_a_milestone_and_a_phase_that_goes_on_to_the_same_end(
    tmp_path: Path, processor: Any, key: str, save_every: int
) -> None:
    recipe = recipe_of()
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": save_every})})
    straight, limited = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "limited", recipe)
    whole = run_phase(straight, processor)
    assert whole.result == {"checkpoint_id": STAGE}
    for update in range(1, NUM_UPDATES):
        stopped = run_phase(replace(limited, budget=SPENT[key]), processor)
        assert sorted(stopped.metrics) == [update], "one update, however little is left"
        assert key in stopped.result["stopped"]
        milestone = read_checkpoint(limited.state, stopped.result["checkpoint_id"])
        assert milestone is not None
        assert (milestone.checkpoint_id, milestone.num_updates) == (f"{STAGE}-u{update:04d}", update)
        assert read_checkpoint(limited.state, STAGE) is None
    last = run_phase(replace(limited, budget=SPENT[key]), processor)
    assert last.result == {"checkpoint_id": STAGE}, "the last update ends the phase, whatever is left"
    assert last.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(limited)) == without_times(recorded(straight))


def test_a_budget_is_asked_after_each_update_and_counts_what_all_of_them_took(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of())
    stopped = run_phase(replace(job, budget=Budget(episodes=4 * TASKS_PER_UPDATE + 1)), processor)
    assert sorted(stopped.metrics) == [1, 2]


def test_asynchronous_a_spent_budget_loses_no_group_and_counts_none_twice(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=1))
    run_phase(replace(job, budget=Budget(episodes=1)), processor)
    assert set(recorded(job)) == {f"{STAGE}-u0000"}
    run_phase(job, processor)
    found = recorded(job)
    assert set(found) == {f"{STAGE}-u{update:04d}" for update in range(NUM_UPDATES)}
    assert set(Counter(one.episode_id for episodes in found.values() for one in episodes).values()) == {1}


def test_figures_of_an_update_name_every_fate_and_every_busy_share(tmp_path: Path, processor: Any) -> None:
    ran = run_phase(job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=2)), processor)
    assert sorted(ran.metrics) == [1, 2, 3, 4]
    for figures in ran.metrics.values():
        fates = [figures[f"num_{fate}_groups"] for fate in ("trained", "zero_variance", "too_few_valid", "stale")]
        assert sum(fates) >= TASKS_PER_UPDATE
        assert figures["num_episodes"] == sum(fates) * 4
        assert 0 <= figures["group_staleness_max"] <= 2
        assert 0 < figures["environments_busy_overall"] <= 1
        assert 0 <= figures["trainer_busy"] <= 1


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("fault", "error"), [(Outcome.POLICY_FAULT, EngineError), (Outcome.ENV_FAULT, EnvServerError)])
def test_an_engine_or_desktops_that_are_down_end_the_phase_in_one_sentence(
    tmp_path: Path, processor: Any, mode: str, fault: Outcome, error: type[Exception]
) -> None:
    job = job_of(tmp_path, recipe_of(mode=mode))
    with pytest.raises(error, match=f"all 8 episodes ended in an? {fault}; the first: it is down"):
        run_phase(job, processor, fault=fault)
    assert recorded(job) == {}


def test_a_phase_of_nothing_but_slow_answers_trains_nothing_and_says_why_in_the_record(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(max_resamples=0))
    ran = run_phase(job, processor, fault=Outcome.TIMEOUT)
    assert [len(trajectories) for _, trajectories in ran.trainer.seen] == [0] * NUM_UPDATES
    assert all(figures["num_too_few_valid_groups"] == TASKS_PER_UPDATE for figures in ran.metrics.values())
