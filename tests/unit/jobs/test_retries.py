"""Which steps are repeated, and which runs a daemon starts again when their process was lost."""

import dagster as dg
import pytest

from assets.retries import FAULT_RETRIES, MAX_RETRIES_TAG, only_after_faults
from jobs.pipeline import JOBS
from osworld_pipeline.definitions import defs
from osworld_pipeline.errors import DependencyError, EngineError, PipelineError, StoreBusyError, TamperingError

JOB_NAMES = sorted(job.name for job in JOBS)
AT_ONCE = dg.RetryPolicy(max_retries=FAULT_RETRIES.max_retries)
SERVICES = {"desktops", "engine", "launcher", "tracking"}


class FailingStep:
    """An asset that raises these exceptions, one for each attempt, and then succeeds."""

    def __init__(self, *errors: Exception, tags: dict[str, str] | None = None) -> None:
        self.num_attempts = 0
        left = list(errors)

        @dg.asset(retry_policy=AT_ONCE)
        @only_after_faults
        def step(context: dg.AssetExecutionContext) -> None:
            self.num_attempts += 1
            if left:
                raise left.pop(0)

        result = dg.materialize([step], raise_on_error=False, tags=tags)
        self.succeeded = result.success
        failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
        self.reasons = [one.user_failure_data.description for one in failures if one.user_failure_data]


def test_a_fault_is_repeated_until_the_step_succeeds() -> None:
    step = FailingStep(EngineError("no answer"), dg.Failure("the program was killed", allow_retries=True))
    assert (step.num_attempts, step.succeeded) == (3, True)


def test_a_persistent_fault_ends_the_step_with_its_own_message() -> None:
    step = FailingStep(*(EngineError(f"no answer {number}") for number in range(9)))
    assert (step.num_attempts, step.reasons) == (3, ["no answer 2"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DependencyError("bubblewrap is missing"), "bubblewrap is missing"),
        (dg.Failure("the loss is not finite", allow_retries=False), "the loss is not finite"),
        (KeyError("a defect"), "KeyError: 'a defect'"),
    ],
)
def test_an_error_that_no_repetition_can_change_fails_at_once(error: Exception, reason: str) -> None:
    step = FailingStep(error)
    assert (step.num_attempts, step.succeeded, step.reasons) == (1, False, [reason])


@pytest.mark.parametrize("error", [EngineError("no answer"), dg.Failure("killed", allow_retries=True)])
def test_a_run_that_a_person_waits_for_repeats_no_step(error: Exception) -> None:
    step = FailingStep(error, tags={MAX_RETRIES_TAG: "0"})
    assert (step.num_attempts, step.succeeded) == (1, False)


def test_subclasses_inherit_whether_they_are_retryable() -> None:
    assert TamperingError("").is_retryable
    assert StoreBusyError("").is_retryable
    assert not PipelineError("").is_retryable


@pytest.mark.parametrize("name", JOB_NAMES)
def test_every_named_job_leaves_retries_of_lost_runs_to_the_instance(name: str) -> None:
    assert MAX_RETRIES_TAG not in defs.resolve_job_def(name).tags


@pytest.mark.parametrize("name", JOB_NAMES)
def test_every_step_that_needs_a_service_is_repeated_after_faults(name: str) -> None:
    for node in defs.resolve_job_def(name).graph.node_defs:
        if isinstance(node, dg.OpDefinition) and node.required_resource_keys & SERVICES:
            assert node.retry_policy is FAULT_RETRIES, node.name
