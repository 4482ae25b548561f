"""The input of a program is the same model for the sender and the program."""

from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.__main__ import PROGRAMS, program_module, read_input
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.evaluate.plan import EvaluationJob, TaskChoice
from osworld_pipeline.runs.job import Job, Policy, StageJob
from osworld_pipeline.runs.placement import Placement, RayResources, RayShare
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers

SERVERS = EnvServers(urls=("http://127.0.0.1:9",), token="a-secret", num_replicas=2)
STAGE = StageJob(
    recipe=load_recipe("smoke", settings=["sft.num_updates=3"]),
    state_root=Path("/state"),
    run_ids={"dagster": "run-1"},
    stage=Stage.GSPO_PHASE1,
    checkpoint_id="gspo_phase1-1",
    parent=Policy(checkpoint_id="sft-1", path="checkpoints/sft-1"),
    data_digest="d",
    servers=SERVERS,
    budget=Budget(episodes=7),
    ray=RayShare(num_rollout_actors=2),
)
EVALUATION = EvaluationJob(
    recipe=load_recipe("smoke"),
    state_root=Path("/state"),
    servers=SERVERS,
    engine_token="another-secret",
    checkpoints=(Policy(checkpoint_id="sft-1", stage="sft"),),
    tasks=TaskChoice(suite="mine", max_tasks=2),
)


@pytest.mark.parametrize("job", [STAGE, EVALUATION])
def test_a_job_arrives_unchanged(job: Job) -> None:
    received = type(job).model_validate_json(job.model_dump_json())
    assert received == job
    assert received.recipe.sources == job.recipe.sources


@pytest.mark.parametrize("job", [STAGE, EVALUATION])
def test_a_job_shows_no_token(job: Job) -> None:
    assert "secret" not in repr(job)


def takes_a_stage(job: StageJob, report: Any) -> None: ...


def takes_anything(job: dict[str, Any], report: Any) -> None: ...


def test_a_program_gets_the_model_that_it_takes() -> None:
    sent = STAGE.model_dump(mode="json")
    assert read_input("train_gspo", takes_a_stage, sent) == STAGE
    assert read_input("own.program", takes_anything, sent) is sent


def test_a_job_that_is_not_valid_is_refused_without_its_values() -> None:
    sent = STAGE.model_dump(mode="json") | {"token": "a-secret"}
    sent.pop("data_digest")
    with pytest.raises(
        RecipeError, match=r"the job of train_gspo is not valid \(data_digest: Field required; token: "
    ) as caught:
        read_input("train_gspo", takes_a_stage, sent)
    assert "secret" not in str(caught.value)


def test_every_program_is_found() -> None:
    assert {program_module(name) for name in PROGRAMS} == set(PROGRAMS.values())
    assert program_module("own.program") == "own.program"
    assert program_module("nothing") is None


SHARE = RayShare(rank=RayResources(gpus=8), rollout_actor=RayResources(gpus=1), driver=RayResources(cpus=0.5))


@pytest.mark.parametrize(
    ("placement", "num_ranks", "num_actors", "expected"),
    [
        (Placement.RANK, 1, 0, SHARE.rank),
        (Placement.RANK, 1, 4, SHARE.rank),
        (Placement.RANK, 8, 0, SHARE.driver),
        (Placement.ROLLOUTS, 1, 0, SHARE.rollout_actor),
        (Placement.ROLLOUTS, 1, 4, SHARE.driver),
        (Placement.DRIVER, 1, 0, SHARE.driver),
    ],
)
def test_a_program_takes_the_resources_of_its_placement(
    placement: Placement, num_ranks: int, num_actors: int, expected: RayResources
) -> None:
    share = SHARE.model_copy(update={"num_rollout_actors": num_actors})
    assert share.entrypoint(placement, num_ranks) == expected


def test_the_placement_of_a_program_follows_from_its_stage() -> None:
    stages = {stage: STAGE.model_copy(update={"stage": stage}).placement for stage in Stage}
    assert stages.pop(Stage.BASE) is Placement.DRIVER
    assert set(stages.values()) == {Placement.RANK}
    assert EVALUATION.placement is Placement.ROLLOUTS


def test_episodes_move_to_rollout_actors_only_if_the_share_has_some() -> None:
    assert STAGE.actors == STAGE.ray
    assert EVALUATION.actors is None
    assert STAGE.model_copy(update={"ray": RayShare()}).actors is None


def test_resources_are_named_as_ray_counts_them() -> None:
    needs = RayResources(cpus=2, gpus=0.5, memory_gb=1.5, custom={"desktop": 3})
    assert str(needs) == "2 CPUs, 0.5 GPUs, 1.5 GiB of memory, 3 desktop"
    assert needs.bundle() == {"CPU": 2, "GPU": 0.5, "memory": 1.5 * 2**30, "desktop": 3}
    assert needs.actor_options() == {"num_cpus": 2, "num_gpus": 0.5, "memory": 3 * 2**29, "resources": {"desktop": 3}}
    assert "memory" not in RayResources().actor_options(), "Ray refuses a reservation of nothing"
