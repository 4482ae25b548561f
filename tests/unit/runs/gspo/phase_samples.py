"""A GSPO phase with a minimal engine and trainer; its weights are a digest of all that it was trained on."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from episode_samples import make_step

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    TokenSequence,
)
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.rollout.run_episode import EpisodePlan
from osworld_pipeline.rollout.utilisation import BusyMeter, Utilisation
from osworld_pipeline.runs.gspo.engine import PhaseRollouts
from osworld_pipeline.runs.gspo.job import GspoJob, resume_point
from osworld_pipeline.runs.gspo.train_gspo import train_phase
from osworld_pipeline.runs.gspo.trainer_thread import TrainerThread
from osworld_pipeline.runs.gspo.weights import Deliver
from osworld_pipeline.runs.job import Policy
from osworld_pipeline.runs.messages import Message, Metrics, Warned
from osworld_pipeline.runs.metrics.serving import observed_program
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.stage_log import stage_log
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.training.between_passes import Arrivals
from osworld_pipeline.training.weights.checkpoint import write_documents, writing_folder

NUM_UPDATES = 4
TASKS_PER_UPDATE = 2
STAGE = "gspo_phase1-test"


class Killed(BaseException):
    """Raised where the process is killed."""


@dataclass
class Fuse:
    """Kills the process, or raises another error, the nth time that a place is passed."""

    place: str = ""
    count: int = 0
    raises: BaseException = field(default_factory=Killed)
    passed: Counter[str] = field(default_factory=Counter)

    def pass_by(self, place: str) -> None:
        self.passed[place] += 1
        if place == self.place and self.passed[place] == self.count:
            raise self.raises


class ChainTrainer:
    """Its weights are a digest of everything it was ever trained on, in order."""

    def __init__(self, folder: Path, num_updates: int, fuse: Fuse) -> None:
        saved = folder / "weights.json"
        self.num_updates = num_updates
        self.weights_digest: str = json.loads(saved.read_text()) if saved.is_file() else "fresh"
        self.seen: list[tuple[int, Sequence[Trajectory]]] = []
        self.num_begun = num_updates
        """Updates that have begun."""
        self.num_late = 0
        """Updates that began while their weights were on their way to the engine."""
        self._fuse = fuse

    def update(self, trajectories: Sequence[Trajectory], arrivals: Arrivals | None = None) -> dict[str, float]:
        self._fuse.pass_by("update")
        self.num_begun = self.num_updates + 1
        if arrivals is not None:
            canaries = arrivals.next()
            assert not callable(canaries), "this engine takes the weights by itself"
            trajectories = (*trajectories, *canaries)
            self.num_late += 1
        self.seen.append((self.num_updates, trajectories))
        reported = [(one.trajectory_id, round(one.advantage, 6), one.policy_versions) for one in trajectories]
        self.weights_digest = digest_json([self.weights_digest, reported])
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
    """Episodes depend on seed and weights alone, except for faults; each takes the configured time. New weights take at
    most `handover_s` to arrive, and arrive at the latest once the update that trains them has started."""

    def __init__(self, trainer: ChainTrainer, fuse: Fuse, faults: Faults, *, handover_s: float = 0.0) -> None:
        self.version, self.weights = trainer.num_updates, trainer.weights_digest
        self._trainer = trainer
        self._fuse = fuse
        self._faults = faults
        self._handover_s = handover_s
        self._num_begun = itertools.count()

    async def hand_over(self, policy_version: int) -> Deliver:
        async def deliver() -> int:
            taken = self._trainer.weights_digest
            for _ in range(round(self._handover_s / 0.002)):
                if self._trainer.num_begun > policy_version:
                    break
                await asyncio.sleep(0.002)
            self._fuse.pass_by("handover")
            assert self._trainer.weights_digest == taken, "the trainer waits with its first step"
            self.version, self.weights = policy_version, taken
            return len(taken)

        return deliver

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
            steps=tuple(
                make_step(index, policy_version=version, prompt_num_tokens=1, response_num_tokens=1)
                for index, version in enumerate(versions)
            ),
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
        stage=Stage.GSPO_PHASE1,
        state_root=root,
        checkpoint_id=STAGE,
        parent=Policy(checkpoint_id="sft-x", path="parent"),
        data_digest="d",
        servers=EnvServers(urls=("http://127.0.0.1:1",), token=None, num_replicas=2),
        run_ids={},
    )


@dataclass
class Ran:
    trainer: ChainTrainer
    reported: Sequence[Message]
    result: Mapping[str, Any]
    error: str = ""

    @property
    def metrics(self) -> dict[int, Mapping[str, float]]:
        """The metrics that were reported last, by update."""
        return {one.update: one.metrics for one in self.reported if isinstance(one, Metrics)}

    @property
    def warnings(self) -> list[str]:
        return [one.message for one in self.reported if isinstance(one, Warned)]


def run_phase(
    job: GspoJob,
    processor: Any,
    fuse: Fuse | None = None,
    *,
    faults: Faults = lambda _: None,
    handover_s: float = 0.0,
    fails: type[BaseException] | None = None,
) -> Ran:
    """Runs the phase as a process of its own would: starts from what is on disk, and may be killed or fail."""
    fuse = fuse or Fuse()
    point = resume_point(job)
    trainer: Any = ChainTrainer(point.folder, point.num_updates, fuse)
    engine = ChainEngine(trainer, fuse, faults, handover_s=handover_s)
    reported: list[Message] = []
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
            TrainerThread() as thread,
            observed_program("train_gspo", job.model_dump(mode="json"), reported.append) as report,
        ):
            result.update(await train_phase(job, rollouts, trainer, thread, point, log, report))
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
    """The training episodes that the store counts, by part."""
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
