"""Training curves as numbers for inline SVG: one small panel for each metric of each stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 240, 96
LEFT, RIGHT, MARGIN_Y = 48, 8, 10
"""The scale's two figures stand in the left margin."""
METRIC_ORDER = (
    "loss",
    "rollout task reward",
    "rollout shaped reward",
    "kl",
    "trainer_sampler_logprob_diff",
    "entropy",
    "clip_fraction",
    "grad_norm",
)
STAGE_ORDER = ("base", "external", "sft", "flywheel", "gspo_phase1", "gspo_phase2")


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    stage: str
    update: int
    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    stage: str
    name: str
    first: float
    last: float
    low: float
    high: float
    first_update: int
    last_update: int
    num_points: int
    line: str
    """Points of an SVG polyline in a WIDTH x HEIGHT box."""
    end: tuple[float, float]
    """Where the last point lies."""
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def stage_rank(self) -> tuple[int, str]:
        """Sorts stages in the order of training."""
        return _rank(STAGE_ORDER, self.stage), self.stage


def draw_curves(points: Sequence[MetricPoint]) -> list[Curve]:
    """A panel for each (stage, metric), in the order of training; points that are not finite are left out, and the
    last of two points of one update stays (a resumed run reports some twice)."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        if math.isfinite(point.value):
            series.setdefault((point.stage, point.name), {})[point.update] = point.value
    keys = sorted(series, key=lambda key: (_rank(STAGE_ORDER, key[0]), _rank(METRIC_ORDER, key[1]), key))
    return [_curve(stage, name, sorted(series[stage, name].items())) for stage, name in keys]


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _curve(stage: str, name: str, points: Sequence[tuple[int, float]]) -> Curve:
    updates = [update for update, _ in points]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    xs = [_scale(update, updates[0], updates[-1], LEFT, WIDTH - RIGHT) for update in updates]
    ys = [_scale(value, low, high, HEIGHT - MARGIN_Y, MARGIN_Y) for value in values]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return Curve(
        stage=stage,
        name=name,
        first=values[0],
        last=values[-1],
        low=low,
        high=high,
        first_update=updates[0],
        last_update=updates[-1],
        num_points=len(points),
        line=line,
        end=(round(xs[-1], 1), round(ys[-1], 1)),
    )


def _scale(value: float, start: float, end: float, to_start: float, to_end: float) -> float:
    """Linear; the middle where there is no range."""
    if start == end:
        return (to_start + to_end) / 2
    return to_start + (value - start) / (end - start) * (to_end - to_start)
