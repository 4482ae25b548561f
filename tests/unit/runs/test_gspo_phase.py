"""A GSPO phase whose episodes and trainer are told in a line each: synchronous, a kill anywhere changes nothing of what
is learned and recorded; asynchronous, nothing is lost, counted twice or older than it may be."""

import asyncio
import itertools
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
    EpisodePurpose,
    Outcome,
    Reward,
    Step,
    StepSignals,
    TokenSequence,
)
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError, EnvServerError, EvaluatorError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.rollout.utilisation import BusyMeter, Utilisation
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.gspo_engine import PhaseRollouts
from osworld_pipeline.runs.gspo_job import GspoJob, resume_point
from osworld_pipeline.runs.stage_log import stage_log
from osworld_pipeline.runs.stages import read_checkpoint
from osworld_pipeline.runs.superseding import supersede
from osworld_pipeline.runs.train_gspo import train_phase
from osworld_pipeline.tables.catalog import fresh_views
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


Faults = Callable[[int], Outcome | None]
"""How the nth episode of a process ends, where it is a fault."""


class ChainEngine:
    """Episodes that depend on seed and weights alone, but for faults; each takes the configured time."""

    def __init__(self, trainer: ChainTrainer, fuse: Fuse, faults: Faults) -> None:
        self.version, self.weights = trainer.num_updates, trainer.weights_digest
        self._trainer = trainer
        self._fuse = fuse
        self._faults = faults
        self._num_begun = itertools.count()

    async def hand_over(self, policy_version: int) -> None:
        self.version, self.weights = policy_version, self._trainer.weights_digest

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return GenerateResult(
            text="r", policy_version=self.version, finish_reason="stop", token_ids=(2,), logprobs=(-0.5,)
        )

    async def run_episode(self, task: Task, plan: EpisodePlan) -> Episode:
        self._fuse.pass_by("episode")
        fault = self._faults(next(self._num_begun))
        versions = []
        for _ in range(2):
            versions.append(self.version)
            await asyncio.sleep(0.001 * (plan.seed % 4))
        luck = int(digest_json([plan.seed, self.weights])[:4], 16) / 0xFFFF
        outcome = fault or (Outcome.SUCCESS if luck > 0.5 else Outcome.FAILURE)
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
    reported: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    error: str = ""

    @property
    def metrics(self) -> dict[int, Mapping[str, float]]:
        """By update, what was reported last."""
        return {one["update"]: one["metrics"] for one in self.reported if one["kind"] == "metrics"}

    @property
    def warnings(self) -> list[str]:
        return [one["message"] for one in self.reported if one["kind"] == "warning"]


def run_phase(
    job: GspoJob,
    processor: Any,
    fuse: Fuse | None = None,
    *,
    faults: Faults = lambda _: None,
    fails: type[BaseException] | None = None,
) -> Ran:
    """A process of its own, as far as the phase can tell: begins at what is on disk, and may be killed or fail."""
    fuse = fuse or Fuse()
    point = resume_point(job)
    trainer: Any = ChainTrainer(point.folder, point.num_updates, fuse)
    engine = ChainEngine(trainer, fuse, faults)
    reported: list[Mapping[str, Any]] = []
    result: dict[str, Any] = {}

    async def run() -> None:
        rollouts = PhaseRollouts(
            run_one=engine.run_episode,
            generate=engine.generate,
            handover=engine.hand_over,
            store=FusedStore(job.state, fuse),
            renderer=Renderer(processor),
            utilisation=Utilisation(environments=BusyMeter(2)),
        )
        stage = job.training_stage
        with (
            stage_log(TrajectoryStore(job.state), stage, num_updates=point.num_updates) as log,
            ThreadPoolExecutor(1) as thread,
        ):
            result.update(await train_phase(job, rollouts, trainer, thread, point, log, reported.append))
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"

    try:
        asyncio.run(run())
    except BaseException as error:
        if fails is None or not isinstance(error, fails):
            raise
        return Ran(trainer, reported, result, error=str(error))
    assert fails is None, "it ran to its end"
    return Ran(trainer, reported, result)


def recorded(job: GspoJob) -> dict[str, list[Episode]]:
    """What the store holds and counts, by part."""
    store = TrajectoryStore(job.state)
    found = store.read_parts(store.existing_parts("episodes"))
    counted = {
        part: [one for one in episodes if one.purpose is EpisodePurpose.TRAIN] for part, episodes in found.items()
    }
    return {part: episodes for part, episodes in counted.items() if episodes}


def rows_of(job: GspoJob, sql: str) -> list[tuple[Any, ...]]:
    with fresh_views(job.state) as connection:
        return connection.execute(sql).fetchall()


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
    run_phase(killed, processor, Fuse(place, count), fails=Killed)
    assert read_checkpoint(killed.state, STAGE) is None
    resumed = run_phase(killed, processor)
    assert resumed.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(killed)) == without_times(recorded(straight))
    assert len(recorded(killed)) == NUM_UPDATES
    numbers = "SELECT \"update\", weights_id, num_episodes, success_rate, metrics['loss'] FROM updates ORDER BY ALL"
    assert rows_of(killed, numbers) == rows_of(straight, numbers)
    assert [row[0] for row in rows_of(killed, numbers)] == [1, 2, 3, 4], "each once, whenever the kill came"
    checkpoint = read_checkpoint(killed.state, STAGE)
    assert checkpoint is not None
    assert checkpoint.num_updates == NUM_UPDATES


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_asynchronous_a_kill_loses_no_group_and_counts_none_twice(
    tmp_path: Path, processor: Any, place: str, count: int
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=1))
    run_phase(job, processor, Fuse(place, count), fails=Killed)
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


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_update_holds_a_token_of_its_own_weights_to_compare(
    tmp_path: Path, processor: Any, max_staleness: int
) -> None:
    ran = run_phase(job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=max_staleness)), processor)
    num_canaries = 0
    for update, trajectories in ran.trainer.seen:
        canaries = [one for one in trajectories if one.is_canary]
        is_fresh = any(update in (one.policy_versions or ()) for one in trajectories if not one.is_canary)
        assert len(canaries) == int(bool(trajectories) and not is_fresh)
        num_canaries += len(canaries)
    assert max_staleness < 3 or num_canaries > 0


def test_what_was_recorded_beyond_the_checkpoint_counts_no_more_before_anything_is_rolled_out(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(mode="asynchronous")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"save_every": 2})})
    job = job_of(tmp_path, recipe)
    run_phase(job, processor, Fuse("update", 4), fails=Killed)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(4)}
    assert [row[0] for row in rows_of(job, 'SELECT "update" FROM updates ORDER BY 1')] == [1, 2, 3]
    before = recorded(job)
    run_phase(job, processor, Fuse("episode", 1), fails=Killed)
    assert set(recorded(job)) == {f"{STAGE}-u{update:04d}" for update in range(2)}
    assert [row[0] for row in rows_of(job, 'SELECT "update" FROM updates ORDER BY 1')] == [1, 2]
    lost = [one for part in sorted(before)[2:] for one in before[part]]
    marked = rows_of(job, "SELECT episode_id, task_reward FROM episodes WHERE purpose = 'superseded' ORDER BY 1")
    assert [(one.rpartition("-superseded-")[0], reward) for one, reward in marked] == sorted(
        (one.episode_id, one.reward.task if one.reward else None) for one in lost
    )
    groups = rows_of(job, "SELECT group_id, reason, episode_ids FROM rollout_groups WHERE fate = 'superseded'")
    assert {name.rpartition("-superseded-")[0] for name, _, _ in groups} == {one.group_id for one in lost}
    assert all("resumed after 2 updates" in reason for _, reason, _ in groups)
    assert sorted(name for _, _, names in groups for name in names) == [name for name, _ in marked]
    steps = rows_of(job, "SELECT count(*) FROM steps WHERE purpose = 'superseded'")
    assert steps == [(sum(len(one.steps) for one in lost),)]


def test_superseding_again_after_a_kill_in_its_middle_keeps_one_copy(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous"))
    run_phase(job, processor, Fuse("update", 2), fails=Killed)
    part = f"{STAGE}-u0001"

    class Dying(TrajectoryStore):
        def write_groups(self, part: str, groups: Any, injections: Any) -> None:
            raise Killed

    with pytest.raises(Killed):
        supersede(Dying(job.state), STAGE, 1)
    assert part in recorded(job), "the originals are still there, and so are their copies"
    for _ in range(2):
        supersede(TrajectoryStore(job.state), STAGE, 1)
        assert part not in recorded(job)
        (counted,) = rows_of(
            job, "SELECT count(*), count(DISTINCT episode_id) FROM episodes WHERE purpose = 'superseded'"
        )
        assert counted[0] == counted[1] > 0
        assert len(rows_of(job, "SELECT * FROM rollout_groups WHERE fate = 'superseded'")) * 4 == counted[0]
        strays = "FROM episodes ANTI JOIN rollout_groups USING (group_id) WHERE purpose = 'superseded'"
        assert rows_of(job, f"SELECT episode_id {strays}") == []


def test_superseded_episodes_whose_groups_were_never_recorded_name_none(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous"))
    run_phase(job, processor, Fuse("write", 2), fails=Killed)
    supersede(TrajectoryStore(job.state), STAGE, 1)
    marked = rows_of(job, "SELECT count(*), count(group_id) FROM episodes WHERE purpose = 'superseded'")
    assert marked[0][0] > 0
    assert marked[0][1] == 0
    assert rows_of(job, "SELECT count(*) FROM rollout_groups WHERE fate = 'superseded'") == [(0,)]


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
        run_phase(job, processor, faults=lambda _: fault)
    assert recorded(job) == {}


def test_a_phase_of_nothing_but_slow_answers_trains_nothing_and_says_why_in_the_record(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(max_resamples=0, max_fault_share=1.0))
    ran = run_phase(job, processor, faults=lambda _: Outcome.TIMEOUT)
    assert [len(trajectories) for _, trajectories in ran.trainer.seen] == [0] * NUM_UPDATES
    assert all(figures["num_too_few_valid_groups"] == TASKS_PER_UPDATE for figures in ran.metrics.values())


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_groups_that_failed_or_succeeded_as_a_whole_are_topped_up_though_their_shaped_rewards_differ(
    tmp_path: Path, processor: Any, mode: str
) -> None:
    recipe = recipe_of(mode=mode, zero_variance="top_up")
    # Pairs: every second group fails or succeeds as a whole.
    job = job_of(tmp_path, recipe.model_copy(update={"gspo": recipe.gspo.model_copy(update={"group_size": 2})}))
    fates: Counter[str] = Counter()
    for update, trajectories in run_phase(job, processor).trainer.seen:
        part = recorded(job)[f"{STAGE}-u{update:04d}"]
        groups = {one.group_id: [other for other in part if other.group_id == one.group_id] for one in part}
        mixed = {name for name, episodes in groups.items() if len({one.is_success for one in episodes}) == 2}
        assert {one.trajectory_id for one in trajectories if not one.is_canary} == {
            one.episode_id for name in mixed for one in groups[name]
        }
        fates.update(["mixed"] * len(mixed), flat=len(groups) - len(mixed))
    assert fates["mixed"] >= 1
    assert fates["flat"] >= 1 or mode == "asynchronous", "synchronous, it is the same every time"


PER_UPDATE = 4 * TASKS_PER_UPDATE


def outage(numbers: range, fault: Outcome = Outcome.ENV_FAULT) -> Faults:
    return lambda number: fault if number in numbers else None


def groups_of(job: GspoJob) -> dict[str, tuple[str, str]]:
    """Fate and reason by group."""
    with fresh_views(job.state) as views:
        rows = views.execute("SELECT group_id, fate, reason FROM rollout_groups").fetchall()
    assert len({row[0] for row in rows}) == len(rows)
    return {name: (fate, reason) for name, fate, reason in rows}


def unheld(found: Mapping[str, Sequence[Episode]]) -> dict[str, list[Episode]]:
    return {part: [one for one in episodes if "-held-" not in one.episode_id] for part, episodes in found.items()}


def test_an_update_of_faults_is_held_and_then_trains_what_it_would_have_trained_without_them(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(held_pause_s=0, zero_variance="top_up")
    straight, disturbed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "disturbed", recipe)
    whole = run_phase(straight, processor)
    num_first = len(recorded(straight)[f"{STAGE}-u0000"])
    ran = run_phase(disturbed, processor, faults=outage(range(num_first, num_first + 2 * PER_UPDATE)))
    assert ran.trainer.weights_digest == whole.trainer.weights_digest
    assert [update for update, _ in ran.trainer.seen] == list(range(NUM_UPDATES))
    assert without_times(unheld(recorded(disturbed))) == without_times(recorded(straight))
    held = {name: told for name, told in groups_of(disturbed).items() if told[0] == "held"}
    assert set(held) == {f"{STAGE}-u0001-g{index:02d}-held-1-1" for index in range(TASKS_PER_UPDATE)}
    (reason,) = {reason for _, reason in held.values()}
    assert reason == (
        "16 of 16 episodes ended in faults, more than rollout.max_fault_share = 0.5 allows; the commonest was "
        "env_fault (16 times): it is down"
    )
    ids = [one.episode_id for one in recorded(disturbed)[f"{STAGE}-u0001"]]
    assert len(ids) == len(set(ids))
    assert f"{STAGE}-u0001-g00-held-1-1-s00-r1" in ids
    told = [one["metrics"] for one in ran.reported if one["kind"] == "metrics" and one["update"] == 2]
    assert [one["is_held"] for one in told] == [1, 0]
    assert [one["is_held_by_faults"] for one in told] == [1, 0]
    assert [one["fault_share"] for one in told] == [1, 0]
    assert (told[0]["num_held_groups"], told[1]["num_held_tries"]) == (TASKS_PER_UPDATE, 1)
    (warning,) = ran.warnings
    assert warning.startswith("update 2 is held: 16 of 16 episodes ended in faults")
    assert warning.endswith("run again in 0 s (held 1 of 3 times)")


def test_an_outage_that_goes_on_ends_training_with_the_commonest_fault_and_leaves_the_weights(
    tmp_path: Path, processor: Any
) -> None:
    recipe = recipe_of(held_pause_s=0, max_held_updates=2)
    straight, job = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "down", recipe)
    whole = run_phase(straight, processor)

    def faults(number: int) -> Outcome | None:
        fault = Outcome.GRADER_FAULT if number % 4 else Outcome.TIMEOUT
        return fault if number >= PER_UPDATE and number % 12 else None

    ran = run_phase(job, processor, faults=faults, fails=EvaluatorError)
    assert ran.error.startswith("update 2 was held 2 times in a row (rollout.max_held_updates): ")
    assert "the commonest was grader_fault (" in ran.error
    assert [update for update, _ in ran.trainer.seen] == [0]
    tries = {name.partition("-held-")[2] for name, (fate, _) in groups_of(job).items() if fate == "held"}
    assert tries == {"1-1", "1-2"}
    assert ran.metrics[2]["is_held"] == 1
    assert ran.metrics[2]["fault_share"] > 0.5
    held = 'SELECT "update", is_held, held_reason, num_held_tries, fault_share > 0.5, loss FROM updates ORDER BY 1'
    assert rows_of(job, held) == [(1, False, None, 0, False, 0.0), (2, True, "faults", 2, True, None)]
    (status, error) = rows_of(job, "SELECT status, error FROM stages")[0]
    assert (status, error) == ("failed", f"EvaluatorError: {ran.error}")
    assert run_phase(job, processor).trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(recorded(job)) == without_times(recorded(straight)), "a rerun replaces what was held"


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_storm_of_failed_resets_costs_a_bounded_number_of_episodes(tmp_path: Path, processor: Any, mode: str) -> None:
    """Each try of an update runs the groups of each update in flight once, and their faulty members once more."""
    num_in_flight = {"synchronous": 1, "asynchronous": 3}[mode]
    recipe = recipe_of(mode=mode, max_staleness=2, held_pause_s=0, max_held_updates=3, zero_variance="top_up")
    job = job_of(tmp_path, recipe)
    begun: list[int] = []

    def faults(number: int) -> Outcome | None:
        begun.append(number)
        return Outcome.ENV_FAULT if number >= PER_UPDATE else None

    ran = run_phase(job, processor, faults=faults, fails=EnvServerError)
    assert "was held 3 times in a row" in ran.error
    assert len(begun) - PER_UPDATE <= 3 * num_in_flight * 2 * PER_UPDATE


@pytest.mark.parametrize(("place", "count"), [("episode", 20), ("write", 2), ("written", 2), ("episode", 30)])
def test_a_kill_around_a_held_update_changes_nothing_of_what_is_learned(
    tmp_path: Path, processor: Any, place: str, count: int
) -> None:
    recipe = recipe_of(held_pause_s=0)
    straight, killed = job_of(tmp_path / "straight", recipe), job_of(tmp_path / "killed", recipe)
    whole = run_phase(straight, processor)
    down = outage(range(PER_UPDATE, 3 * PER_UPDATE))
    run_phase(killed, processor, Fuse(place, count), faults=down, fails=Killed)
    # The first try of the resumed process is held, too.
    resumed = run_phase(killed, processor, faults=outage(range(1, 2 * PER_UPDATE - 1)))
    assert resumed.trainer.weights_digest == whole.trainer.weights_digest
    assert without_times(unheld(recorded(killed))) == without_times(recorded(straight))


def test_asynchronous_a_held_update_goes_on_with_new_rollouts_and_counts_none_twice(
    tmp_path: Path, processor: Any
) -> None:
    job = job_of(tmp_path, recipe_of(mode="asynchronous", max_staleness=2, held_pause_s=0, max_held_updates=5))
    ran = run_phase(job, processor, faults=outage(range(10, 60)))
    assert [update for update, _ in ran.trainer.seen] == list(range(NUM_UPDATES))
    assert sum(figures["num_held_tries"] for figures in ran.metrics.values()) >= 1
    assert all(figures["fault_share"] <= 0.5 for figures in ran.metrics.values())
    found = recorded(job)
    ids = Counter(one.episode_id for episodes in found.values() for one in episodes)
    assert set(ids.values()) == {1}
    groups = groups_of(job)
    serials = {name for name in groups if "-held-" not in name}
    assert serials == {f"{STAGE}-g{serial:06d}" for serial in range(len(serials))}, "held groups run again"
    for part, episodes in unheld(found).items():
        assert all(one.update == int(part[-4:]) for one in episodes)
        assert sum(not one.outcome.is_valid for one in episodes) <= len(episodes) / 2


@pytest.mark.parametrize(("max_fault_share", "is_held"), [(0.49, 1.0), (0.5, 0.0), (1.0, 0.0)])
def test_an_update_is_held_only_beyond_the_share(
    tmp_path: Path, processor: Any, max_fault_share: float, is_held: float
) -> None:
    recipe = recipe_of(max_fault_share=max_fault_share, held_pause_s=0, max_concurrent_episodes=1)
    # Two of a group of four: none is resampled.
    ran = run_phase(
        job_of(tmp_path, recipe), processor, faults=lambda number: Outcome.TIMEOUT if number in (0, 2, 5, 7) else None
    )
    first = next(one["metrics"] for one in ran.reported if one["kind"] == "metrics")
    assert (first["is_held"], first["fault_share"]) == (is_held, 0.5)


def test_what_held_tries_took_counts_in_the_budget(tmp_path: Path, processor: Any) -> None:
    job = job_of(tmp_path, recipe_of(held_pause_s=0))
    budget = Budget(episodes=PER_UPDATE + 1)
    stopped = run_phase(replace(job, budget=budget), processor, faults=outage(range(1, 2 * PER_UPDATE - 1)))
    assert sorted(stopped.metrics) == [1], "a held try and a whole one"
    assert "retraining.max_episodes" in stopped.result["stopped"]
