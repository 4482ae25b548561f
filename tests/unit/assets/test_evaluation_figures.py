"""What is reported to Dagster and MLflow about an evaluation."""

from eval_samples import eval_rows

from assets.evaluations import evaluation_result, mlflow_figures
from osworld_pipeline.evaluation.scores import summarise
from osworld_pipeline.runs.evaluate.plan import EvaluationPlan

PROBED = {"parity_num_tokens": 56, "parity_mean_diff": 2e-7, "parity_max_diff": 1e-6}
FIGURES = {"eval/parity_num_tokens": 56, "eval/parity_mean_diff": 2e-7, "eval/parity_max_diff": 1e-6}
PLAN = EvaluationPlan(key="k", stage_key="eval-c-k", suite_digest="d", episodes={})


def test_the_figures_include_the_parity_probe_of_the_engine_if_there_was_one() -> None:
    score = summarise(eval_rows(["s", "f"], **PROBED))
    figures = mlflow_figures(score)
    assert FIGURES.items() <= figures.items()
    assert figures["eval/success_rate"] == 0.5
    metadata = evaluation_result(score, PLAN).metadata or {}
    assert metadata["parity mean difference"] == 2e-7
    assert metadata["parity largest difference"] == 1e-6


def test_an_engine_that_was_not_probed_adds_no_figure() -> None:
    score = summarise(eval_rows(["s"]))
    assert not FIGURES.keys() & mlflow_figures(score).keys()
    assert not any("parity" in name for name in evaluation_result(score, PLAN).metadata or {})
