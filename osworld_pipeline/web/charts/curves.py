"""Training curves as numbers for inline SVG, and as a separate picture: one small panel for each metric of each
stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from osworld_pipeline.evaluation.training_record import MetricPoint

WIDTH, HEIGHT = 240, 96
MAX_POINTS = WIDTH
"""Points of a line; one for each pixel."""
CAPTION, FOOT, GAP = 18, 20, 12
"""Above, below and between the panels of a picture."""
INK, SOFT_INK, LINE = "#1c2430", "#5d6878", "#1f5fa8"
LEFT, RIGHT, MARGIN_Y = 48, 8, 10
"""The scale's two figures are in the left margin."""
METRIC_ORDER = (
    "success_rate",
    "task_reward_mean",
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
    """Coordinates of the last point."""
    width: int = WIDTH
    height: int = HEIGHT


def draw_curves(points: Sequence[MetricPoint]) -> list[Curve]:
    """A panel for each (stage, metric), in the order of training. Points that are not finite are left out; of two
    points of one update the last is used (a resumed run reports some twice)."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        if math.isfinite(point.value):
            series.setdefault((point.stage, point.name), {})[point.update] = point.value
    keys = sorted(series, key=lambda key: (_rank(STAGE_ORDER, key[0]), _rank(METRIC_ORDER, key[1]), key))
    return [_curve(stage, name, sorted(series[stage, name].items())) for stage, name in keys]


def curves_svg(curves: Sequence[Curve], *, columns: int = 3) -> str:
    """A picture of all of them on a white background, because it may be shown on a dark page."""
    width, height = WIDTH + 2 * GAP, HEIGHT + CAPTION + FOOT + GAP
    rows = -(-len(curves) // columns)
    size = (min(columns, len(curves)) * width, rows * height)
    panels = "".join(
        f'<g transform="translate({index % columns * width + GAP},{index // columns * height + GAP})">{_panel(one)}</g>'
        for index, one in enumerate(curves)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{panels}</svg>'
    )


def _panel(curve: Curve) -> str:
    """Caption, scale, line, and the last value."""
    texts = [(0, 12, escape(curve.name.replace("_", " ")), INK), (0, CAPTION + 14, f"{curve.high:.3g}", SOFT_INK)]
    if curve.low != curve.high:
        texts.append((0, CAPTION + HEIGHT - 5, f"{curve.low:.3g}", SOFT_INK))
    updates = f"updates {curve.first_update} to {curve.last_update}"
    texts.append((0, CAPTION + HEIGHT + 14, f"{updates}, last {curve.last:.3g}", SOFT_INK))
    drawn = "".join(f'<text x="{x}" y="{y}" fill="{ink}">{words}</text>' for x, y, words, ink in texts)
    x, y = curve.end
    return (
        f'{drawn}<g transform="translate(0,{CAPTION})">'
        f'<line x1="{LEFT}" y1="{HEIGHT - 1}" x2="{WIDTH}" y2="{HEIGHT - 1}" stroke="#d5d9e0"/>'
        f'<polyline points="{curve.line}" fill="none" stroke="{LINE}" stroke-width="1.6" stroke-linejoin="round"/>'
        f'<circle cx="{x}" cy="{y}" r="3" fill="{LINE}"/></g>'
    )


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _curve(stage: str, name: str, points: Sequence[tuple[int, float]]) -> Curve:
    updates = [update for update, _ in points]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    xs = [_scale(update, updates[0], updates[-1], LEFT, WIDTH - RIGHT) for update in updates]
    ys = [_scale(value, low, high, HEIGHT - MARGIN_Y, MARGIN_Y) for value in values]
    places = list(zip(xs, ys, strict=True))
    stride = -(-len(places) // MAX_POINTS)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*places[:-1:stride], places[-1]))
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
    """Linear; the middle if the range is empty."""
    if start == end:
        return (to_start + to_end) / 2
    span = end - start
    # The range may exceed the largest float; halves of it do not.
    share = (value - start) / span if math.isfinite(span) else (value / 2 - start / 2) / (end / 2 - start / 2)
    return to_start + share * (to_end - to_start)
