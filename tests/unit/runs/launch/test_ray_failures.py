"""The message that a launcher receives when ranks under Ray fail. No Ray is started."""

import pickle

import pytest

from osworld_pipeline.runs.launch.ray_train import RankFailedError, explain_failure

pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")


class GroupFailedError(Exception):
    def __init__(self, worker_failures: dict[int, Exception]) -> None:
        super().__init__("training failed")
        self.worker_failures = worker_failures


def test_the_message_is_that_of_the_failed_rank():
    message = explain_failure("train_sft", 2, GroupFailedError({1: RankFailedError("the loss is not finite", False)}))
    assert (message.message, message.retryable) == ("the loss is not finite", False)


def test_a_rank_that_died_is_reported_before_ranks_that_lost_it():
    from ray.exceptions import ActorDiedError

    failures = {0: RankFailedError("rank 0 lost another rank", False), 1: ActorDiedError()}
    message = explain_failure("train_sft", 2, GroupFailedError(failures))
    assert message.message.startswith("rank 1 of train_sft (2 ranks) failed without a report of the program")
    assert message.retryable is True


def test_a_bug_is_not_tried_again():
    message = explain_failure("train_sft", 2, GroupFailedError({0: ZeroDivisionError("division by zero")}))
    assert "division by zero" in message.message
    assert message.retryable is False


def test_a_failure_without_ranks_names_the_program():
    message = explain_failure("train_sft", 2, RuntimeError("no controller"))
    assert message.message == "the ranks of train_sft failed without a report of the program: no controller"


def test_a_ranks_error_can_be_pickled_for_the_driver():
    error = pickle.loads(pickle.dumps(RankFailedError("gone", True)))
    assert (error.message, error.retryable) == ("gone", True)
