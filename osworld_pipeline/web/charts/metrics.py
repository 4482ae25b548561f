"""The trainer's metrics, their names and units, and their plots. To show another one, add it to a group."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.evaluation.training_record import MetricPoint
from osworld_pipeline.web.charts.plots import Chart, Point, Series, is_drawn, line_chart
from osworld_pipeline.web.charts.ticks import Bins
from osworld_pipeline.web.formats import sentence, words
from osworld_pipeline.web.names import stage_rank

UPDATE = "update"
"""Label of the horizontal axis."""
Values = Mapping[str, Mapping[int, float]]
"""Values by metric and update."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    """Name in MLflow."""
    words: str
    unit: str = "value"
    """Label of the vertical axis, where the metric has its own plot."""
    is_share: bool = False
    """0 to 1, shown in percent."""
    line: str = ""
    """Its name next to others in one plot; `words` if empty."""


def _metric(name: str, unit: str = "value", title: str = "", *, line: str = "", is_share: bool = False) -> Metric:
    return Metric(name=name, unit=unit, words=title or words(name), is_share=is_share, line=line)


SUCCESS_METRICS = (
    _metric("success_rate", "share of valid episodes"),
    _metric("task_reward", "reward"),
    _metric("rollout_task_reward", "reward"),
    _metric("rollout_shaped_reward", "reward"),
)
LOSS_METRICS = (
    _metric("loss", "loss"),
    _metric("grad_norm", "norm", "gradient norm"),
    _metric("learning_rate", "rate"),
    _metric("kl", "nats", "KL to the reference"),
    _metric("entropy", "nats"),
    _metric("clipped_share", "share", "share of ratios clipped", is_share=True),
    _metric("ratio_mean", "ratio", "mean ratio"),
    _metric("importance_mean", "weight", "mean importance weight"),
)
CHECK_METRICS = (
    _metric("trainer_sampler_logprob_diff", "nats", "difference of log-probabilities", line="fresh tokens"),
    _metric(
        "trainer_sampler_logprob_diff_stale", "nats", "difference of log-probabilities, stale", line="stale tokens"
    ),
)
STALENESS_METRICS = (
    _metric("staleness_mean", line="token, mean"),
    _metric("staleness_max", line="token, oldest"),
    _metric("group_staleness_max", line="group, oldest"),
)
BUSY_METRICS = (
    _metric("environments_busy", line="environments", is_share=True),
    _metric("engine_busy", line="engine", is_share=True),
    _metric("trainer_busy", line="trainer", is_share=True),
)
TIME_METRICS = (
    _metric("rollout_s", line="rollouts"),
    _metric("score_s", line="scoring"),
    _metric("canary_wait_s", line="waiting for weights"),
    _metric("forward_s", line="passes"),
    _metric("optimizer_s", line="optimiser"),
)
SPEED_METRICS = (
    _metric("tokens_per_s", "tokens a second", "tokens a second"),
    _metric("padding_share", "share of a pass", is_share=True),
)
REPLAY_METRICS = (
    _metric("replay_coverage", line="demonstrated", is_share=True),
    _metric("replay_verified_coverage", line="demonstrated and verified", is_share=True),
)
REPORTED_METRICS = (
    *LOSS_METRICS,
    *CHECK_METRICS,
    *STALENESS_METRICS,
    *BUSY_METRICS,
    *TIME_METRICS,
    *SPEED_METRICS,
    *REPLAY_METRICS,
)
"""The metrics that the plots read from MLflow."""
_KNOWN = {metric.name: metric for metric in (*SUCCESS_METRICS, *REPORTED_METRICS)}
"""The metrics in the order of their plots."""


def by_metric(points: Iterable[MetricPoint]) -> dict[str, dict[int, float]]:
    """The values by metric and update. The last of two points of one update counts (a resumed run reports some
    twice)."""
    found: dict[str, dict[int, float]] = {}
    for point in points:
        if is_drawn(point.value):
            found.setdefault(point.name, {})[point.update] = point.value
    return found


def stage_charts(points: Sequence[MetricPoint]) -> list[tuple[str, list[Chart]]]:
    """A plot for each metric, by stage in the order of training."""
    found = []
    for stage in sorted({point.stage for point in points}, key=lambda one: (stage_rank(one), one)):
        values = by_metric(point for point in points if point.stage == stage)
        metrics = [
            *(one for name, one in _KNOWN.items() if name in values),
            *map(_metric, sorted(values.keys() - _KNOWN)),
        ]
        charts = [metric_lines(one.words, values, (one,), one.unit) for one in metrics]
        found.append((stage, [chart for chart in charts if chart is not None]))
    return [(stage, charts) for stage, charts in found if charts]


def metric_lines(title: str, values: Values, metrics: Sequence[Metric], y_label: str) -> Chart | None:
    """One line for each of `metrics` that has values; None if none has."""
    reported = [metric for metric in metrics if values.get(metric.name)]
    if not reported:
        return None
    bins = Bins.over(update for metric in reported for update in values[metric.name])
    series = [
        Series(name=metric.line or metric.words, colour=index, points=bin_means(bins, values[metric.name]))
        for index, metric in enumerate(reported)
    ]
    return line_chart(
        sentence(title), series, x_label=UPDATE, y_label=y_label, is_share=all(metric.is_share for metric in reported),
        note=bins.note,
    )  # fmt: skip


def bin_means(bins: Bins, values: Mapping[int, float]) -> tuple[Point, ...]:
    return tuple(
        Point(x=bins.centre(index), y=mean(found), label=bins.label(index))
        for index, found in sorted(bins.gather(values.items()).items())
    )


def mean(values: Sequence[float]) -> float:
    """NaN without a value."""
    return math.fsum(values) / len(values) if values else math.nan
