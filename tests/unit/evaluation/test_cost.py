"""The cost of a success, against values computed by hand."""

from typing import Any

from eval_samples import eval_row

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.evaluation.cost import total_cost
from osworld_pipeline.evaluation.scores import EvalRow

SPENT: dict[str, Any] = {
    "prompt_tokens": 1000, "response_tokens": 30, "wall_s": 9.0, "reset_s": 1.0, "model_s": 4.0, "step_s": 2.0,
    "evaluate_s": 0.5,
}  # fmt: skip


def row(outcome: Outcome, **changes: Any) -> EvalRow:
    return eval_row(outcome, **(SPENT | changes))


def test_the_cost_of_a_success_includes_failures_and_faults() -> None:
    fault = row(Outcome.ENV_FAULT, prompt_tokens=0, response_tokens=0, wall_s=3.0, step_s=0.0, evaluate_s=0.0)
    cost = total_cost([row(Outcome.SUCCESS), row(Outcome.SUCCESS), row(Outcome.FAILURE), fault])
    share, each = cost.per_success(), cost.per_episode()
    assert share is not None
    assert each is not None
    assert (share.response_tokens, share.prompt_tokens, share.wall_s) == (45.0, 1500.0, 15.0)
    assert (share.desktop_s, share.model_s) == (5.75, 8.0)
    assert (each.response_tokens, each.wall_s) == (22.5, 7.5)


def test_without_a_success_there_is_no_cost_per_success() -> None:
    cost = total_cost([row(Outcome.FAILURE)])
    assert cost.per_success() is None
    assert cost.per_episode() is not None
    assert total_cost([]).per_episode() is None


def test_a_count_that_one_episode_lacks_is_unknown_in_total_and_the_other_counts_are_known() -> None:
    cost = total_cost([row(Outcome.SUCCESS), row(Outcome.SUCCESS, response_tokens=None, reset_s=None)])
    share = cost.per_success()
    assert share is not None
    assert (share.response_tokens, share.desktop_s) == (None, None)
    assert (share.prompt_tokens, share.model_s) == (1000.0, 4.0)
