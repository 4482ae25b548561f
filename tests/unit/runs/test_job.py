"""The input of a program is one model on both sides."""

from pathlib import Path
from typing import Any

import pytest

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.__main__ import PROGRAMS, program_module, read_input
from osworld_pipeline.runs.budget import Budget
from osworld_pipeline.runs.evaluate.plan import EvaluationJob, TaskChoice
from osworld_pipeline.runs.job import Job, Policy, RayShare, StageJob
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
def test_a_job_arrives_as_it_was_sent(job: Job) -> None:
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
