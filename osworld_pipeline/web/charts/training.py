"""The plots of one stage of training, from its record: rollouts, trained groups, the trainer's metrics, and
utilisation."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.domain.group import GroupStatus
from osworld_pipeline.evaluation.intervals import percentiles, rate_over_tasks
from osworld_pipeline.evaluation.scores import score_checkpoints
from osworld_pipeline.evaluation.training_record import TrainingEpisode, TrainingRecord
from osworld_pipeline.web.charts.metrics import (
    BUSY_METRICS,
    CHECK_METRICS,
    LOSS_METRICS,
    REPLAY_METRICS,
    SPEED_METRICS,
    STALENESS_METRICS,
    TIME_METRICS,
    UPDATE,
    Metric,
    bin_means,
    by_metric,
    mean,
    metric_lines,
)
from osworld_pipeline.web.charts.plots import Chart, Point, Series, line_chart, stacked_chart
from osworld_pipeline.web.charts.start_zone import start_zone
from osworld_pipeline.web.charts.ticks import Bins
from osworld_pipeline.web.evaluation_names import EvaluationName, name_of
from osworld_pipeline.web.formats import words

OUTCOME_COLOURS = {
    Outcome.SUCCESS: 2,
    Outcome.FAILURE: 5,
    Outcome.TRUNCATED: 1,
    Outcome.TAMPERING: 0,
    Outcome.TIMEOUT: 6,
    Outcome.ENV_FAULT: 3,
    Outcome.POLICY_FAULT: 7,
    Outcome.GRADER_FAULT: 4,
    Outcome.TOUCHED: 8,
}
STATUS_COLOURS = {
    GroupStatus.TRAINED: 2,
    GroupStatus.ZERO_VARIANCE: 6,
    GroupStatus.TOO_FEW_VALID: 5,
    GroupStatus.STALE: 1,
    GroupStatus.HELD: 4,
    GroupStatus.NOT_KEPT: 3,
}
MIDDLE = 0.8
"""Share of the episodes within a band of lengths."""
MAX_PARTS = 6
"""Terms of the reward in one plot."""


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    about: str
    charts: tuple[Chart, ...]


def training_sections(
    record: TrainingRecord, *, confidence: float = 0.95, names: Mapping[str, EvaluationName] | None = None
) -> list[Section]:
    """The sections with at least one plot. `names`: of evaluations, by key."""
    rollouts = _Rollouts(record, confidence) if record.episodes else None
    trainer = _Trainer(record)
    found = [
        Section(
            title="Evaluated suites",
            about="Success of milestones and of the final checkpoint; a line for each suite and evaluation setting.",
            charts=_some(_evaluated(record, confidence, names or {})),
        )
    ]
    if rollouts is not None:
        found += [
            Section(
                title="Rollouts",
                about="Raw success is the graders' score of valid episodes; the shaped reward is used for training, "
                "and is never mixed with it.",
                charts=_some(rollouts.success(), rollouts.outcomes(), rollouts.raw_reward(), *rollouts.shaped_reward()),
            ),
            Section(
                title="Groups and replay",
                about="A group without variance gives no gradient, unless a replay row joined it.",
                charts=_some(
                    rollouts.fates(),
                    rollouts.injections(),
                    trainer.lines("Tasks that replay could serve", REPLAY_METRICS, "training tasks"),
                ),
            ),
            Section(
                title="Lengths",
                about=f"Bands cover the middle {MIDDLE:.0%} of the episodes.",
                charts=_some(rollouts.turns(), rollouts.response_tokens(), rollouts.unparsed()),
            ),
        ]
    found += [
        Section(
            title="The optimiser",
            about="Metrics of the trainer, update by update.",
            charts=_some(*(trainer.one(metric) for metric in LOSS_METRICS)),
        ),
        Section(
            title="Sampler and trainer",
            about="Age of the weights that sampled, and the difference of the trainer's log-probabilities of the "
            "sampled tokens from the sampler's own.",
            charts=_some(
                trainer.lines("Staleness", STALENESS_METRICS, "updates"),
                trainer.lines("Difference of log-probabilities", CHECK_METRICS, "nats, mean of absolute values"),
            ),
        ),
        Section(
            title="Utilisation and time",
            about="Environments: replicas held by an episode. Engine: time with a request in it. Trainer: time in an "
            "update.",
            charts=_some(
                trainer.lines("Utilisation", BUSY_METRICS, "share of the time"),
                trainer.times(),
                rollouts.episode_times() if rollouts else None,
                *(trainer.one(metric) for metric in SPEED_METRICS),
            ),
        ),
    ]
    return [section for section in found if section.charts]


def _some(*charts: Chart | None) -> tuple[Chart, ...]:
    return tuple(chart for chart in charts if chart is not None)


def _evaluated(record: TrainingRecord, confidence: float, names: Mapping[str, EvaluationName]) -> Chart | None:
    by_evaluation: dict[tuple[str, str], list[Point]] = {}
    for score in score_checkpoints(record.evals, confidence=confidence):
        key = score.stage_key.removeprefix(f"eval-{score.checkpoint_id}-")
        at = record.num_updates_of[score.checkpoint_id]
        point = Point(x=at, y=score.success_rate, low=score.low, high=score.high)
        by_evaluation.setdefault((key, score.desktops), []).append(point)
    num_desktops = Counter(key for key, _ in by_evaluation)
    names_of = {
        (key, desktops): name_of(key, names) + (f" · {desktops or 'not graded'}" if num_desktops[key] > 1 else "")
        for key, desktops in by_evaluation
    }
    places = {key: place for place, key in enumerate(names)}
    order = sorted(by_evaluation, key=lambda one: (places.get(one[0], len(places)), one))
    series = [
        Series(name=names_of[one], points=tuple(sorted(by_evaluation[one], key=lambda point: point.x)), colour=index)
        for index, one in enumerate(order)
    ]
    zones = [
        start_zone(
            [row for row in record.start_evals if (row.evaluation_key, row.desktops) == one],
            confidence=confidence,
            colour=index,
        )
        for index, one in enumerate(order)
    ]
    return line_chart(
        "Success on evaluated tasks", series, x_label="updates", y_label="valid episodes", is_share=True,
        band=f"interval at {confidence:.0%}", zones=[zone for zone in zones if zone],
        note=names_of.popitem()[1] if len(names_of) == 1 else "",
    )  # fmt: skip


class _Rollouts:
    """Plots over the episodes of a stage that has some."""

    def __init__(self, record: TrainingRecord, confidence: float) -> None:
        self._record = record
        self._confidence = confidence
        self._bins = Bins.over(episode.update for episode in record.episodes)
        self._by_bin = self._bins.gather((episode.update, episode) for episode in record.episodes)

    def success(self) -> Chart | None:
        points = []
        for index, episodes in sorted(self._by_bin.items()):
            by_task: dict[str, list[bool]] = {}
            for episode in episodes:
                if episode.is_valid:
                    by_task.setdefault(episode.task_id, []).append(episode.is_success)
            rate = rate_over_tasks(list(by_task.values()), confidence=self._confidence)
            ends = (rate.interval.low, rate.interval.high) if rate.n else (None, None)
            points.append(self._point(index, rate.value, *ends))
        return line_chart(
            "Success in training", [Series(name="success", points=tuple(points))], x_label=UPDATE,
            y_label="valid episodes", is_share=True, band=f"interval at {self._confidence:.0%}", note=self._bins.note,
        )  # fmt: skip

    def outcomes(self) -> Chart | None:
        counts = {index: Counter(one.outcome for one in episodes) for index, episodes in self._by_bin.items()}
        series = [
            Series(name=words(kind), colour=colour, points=self._columns(counts, str(kind)))
            for kind, colour in OUTCOME_COLOURS.items()
        ]
        return stacked_chart(
            "Outcomes", series, x_label=UPDATE, y_label="all episodes, faults too", is_share=True, note=self._bins.note
        )

    def raw_reward(self) -> Chart | None:
        points = self._means(lambda episode: episode.task_reward)
        return self._lines("Raw task reward", {"task reward": points}, "mean over valid episodes")

    def shaped_reward(self) -> list[Chart | None]:
        terms = {
            "shaped": self._means(lambda episode: episode.shaped_reward),
            "partial": self._means(lambda episode: episode.partial_reward),
            "penalty": self._means(lambda episode: episode.penalty),
        }
        names = Counter(name for episode in self._record.episodes for name in episode.reward_parts)
        chosen = sorted(name for name, _ in names.most_common(MAX_PARTS))
        parts = {words(name): self._means(lambda episode, name=name: episode.reward_parts.get(name)) for name in chosen}
        left_out = len(names) - len(chosen)
        note = f"{left_out} rarer terms are left out." if left_out else ""
        return [
            self._lines("Shaped reward", terms, "mean over valid episodes"),
            self._lines(
                "Terms of the shaped reward, before weights", parts, "mean over valid episodes with the term", note=note
            ),
        ]

    def fates(self) -> Chart | None:
        by_bin = self._bins.gather(
            (group.update, group.status) for group in self._record.groups if group.update <= self._bins.last
        )
        counts = {index: Counter(found) for index, found in by_bin.items()}
        series = [
            Series(name=words(status), colour=colour, points=self._columns(counts, str(status)))
            for status, colour in STATUS_COLOURS.items()
        ]
        return stacked_chart(
            "Groups, trained and dropped", series, x_label=UPDATE, y_label="groups", note=self._bins.note
        )

    def injections(self) -> Chart | None:
        found = [(one.update, one.source_dataset or one.kind) for one in self._record.injections]
        by_bin = self._bins.gather(pair for pair in found if pair[0] <= self._bins.last)
        counts = {index: Counter(sources) for index, sources in by_bin.items()}
        names = [name for name, _ in Counter(name for _, name in found).most_common()]
        series = [
            Series(name=f"from {name}", colour=index, points=self._columns(counts, name))
            for index, name in enumerate(names[:MAX_PARTS])
        ]
        note = self._bins.note
        if len(names) > MAX_PARTS:
            note = f"{note} {len(names) - MAX_PARTS} rarer sources are left out.".strip()
        return stacked_chart("Replay rows injected", series, x_label=UPDATE, y_label="rows", note=note)

    def turns(self) -> Chart | None:
        return self._lengths("Turns of an episode", "turns", lambda episode: float(episode.num_steps))

    def response_tokens(self) -> Chart | None:
        def a_turn(episode: TrainingEpisode) -> float | None:
            return (
                episode.response_tokens / episode.num_steps if episode.response_tokens and episode.num_steps else None
            )

        return self._lengths("Response tokens of a turn", "tokens", a_turn)

    def unparsed(self) -> Chart | None:
        def share(episode: TrainingEpisode) -> float | None:
            return (episode.unparsed or 0) / episode.num_steps if episode.num_steps else None

        points = {"share": self._means(share, of_valid=False)}
        return self._lines("Turns without an action", points, "mean over episodes", is_share=True)

    def episode_times(self) -> Chart | None:
        series = [
            Series(name=name, colour=colour, points=self._filled(lambda one, name=name: one.times_s.get(name)))
            for name, colour in (("reset", 3), ("model", 0), ("step", 1), ("evaluate", 2))
        ]
        return stacked_chart(
            "Where an episode's time went", series, x_label=UPDATE, y_label="seconds, mean", note=self._bins.note
        )

    def _lengths(self, title: str, unit: str, of: Callable[[TrainingEpisode], float | None]) -> Chart | None:
        points = []
        for index, episodes in sorted(self._by_bin.items()):
            values = [value for one in episodes if one.is_valid and (value := of(one)) is not None]
            ends = percentiles(values, MIDDLE) if values else (None, None)
            points.append(self._point(index, mean(values), *ends))
        return line_chart(
            title, [Series(name="mean", points=tuple(points))], x_label=UPDATE, y_label=f"{unit}, valid episodes",
            band=f"middle {MIDDLE:.0%}", note=self._bins.note,
        )  # fmt: skip

    def _lines(
        self,
        title: str,
        found: Mapping[str, tuple[Point, ...]],
        y_label: str,
        *,
        is_share: bool = False,
        note: str = "",
    ) -> Chart | None:
        series = [Series(name=name, points=points, colour=index) for index, (name, points) in enumerate(found.items())]
        notes = f"{self._bins.note} {note}".strip()
        return line_chart(title, series, x_label=UPDATE, y_label=y_label, is_share=is_share, note=notes)

    def _means(self, of: Callable[[TrainingEpisode], float | None], *, of_valid: bool = True) -> tuple[Point, ...]:
        return tuple(
            self._point(
                index,
                mean([value for one in episodes if one.is_valid or not of_valid if (value := of(one)) is not None]),
            )
            for index, episodes in sorted(self._by_bin.items())
        )

    def _filled(self, of: Callable[[TrainingEpisode], float | None]) -> tuple[Point, ...]:
        """A mean for each bin, 0 for empty ones, as columns require."""
        means = {point.x: point.y for point in self._means(of)}
        return tuple(
            self._point(index, value if math.isfinite(value := means.get(self._bins.centre(index), 0.0)) else 0.0)
            for index in range(len(self._bins))
        )

    def _columns(self, counts: Mapping[int, Counter[str]], name: str) -> tuple[Point, ...]:
        return tuple(
            self._point(index, float(counts[index][name]) if index in counts else 0.0)
            for index in range(len(self._bins))
        )

    def _point(self, index: int, value: float, low: float | None = None, high: float | None = None) -> Point:
        return Point(x=self._bins.centre(index), y=value, low=low, high=high, label=self._bins.label(index))


class _Trainer:
    """Plots of the trainer's metrics."""

    def __init__(self, record: TrainingRecord) -> None:
        self._values = by_metric(record.metrics)

    def lines(self, title: str, metrics: Sequence[Metric], y_label: str) -> Chart | None:
        """One line for each of `metrics` that was reported."""
        return metric_lines(title, self._values, metrics, y_label)

    def one(self, metric: Metric) -> Chart | None:
        return self.lines(metric.words, (metric,), metric.unit)

    def times(self) -> Chart | None:
        reported = [metric for metric in TIME_METRICS if metric.name in self._values]
        if not reported:
            return None
        bins = Bins.over(update for metric in reported for update in self._values[metric.name])
        series = []
        for index, metric in enumerate(reported):
            found = {point.x: point.y for point in bin_means(bins, self._values[metric.name])}
            points = tuple(
                Point(x=bins.centre(at), y=found.get(bins.centre(at), 0.0), label=bins.label(at))
                for at in range(len(bins))
            )
            series.append(Series(name=metric.line, colour=index, points=points))
        return stacked_chart("Where an update's time went", series, x_label=UPDATE, y_label="seconds", note=bins.note)
