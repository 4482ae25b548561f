"""Learning curves as a picture: success of the rollouts by update, and held-out success at the end of each phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WINDOW = 5
"""Updates that a line averages over."""


@dataclass(frozen=True, kw_only=True)
class RewardCurve:
    seed: int
    rollouts: Sequence[float]
    """Share of successful episodes, by update of both phases."""
    heldout: Sequence[tuple[int, float]]
    """(number of updates, success) of SFT, phase 1 and phase 2."""


def draw_learning(path: Path, arms: Mapping[str, Sequence[RewardCurve]], *, title: str) -> None:
    """Draw one panel for each arm: thin lines are seeds, the thick one is their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, panels = pyplot.subplots(
        1, len(arms), figsize=(6.4 * len(arms), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, curves) in zip(panels[0], arms.items(), strict=True):
        for curve in curves:
            panel.plot(*_smooth(curve.rollouts), color="#8fb3d9", linewidth=1)
        shared = min(len(curve.rollouts) for curve in curves)
        mean = [sum(curve.rollouts[index] for curve in curves) / len(curves) for index in range(shared)]
        panel.plot(*_smooth(mean), color="#1f5fa8", linewidth=2.5, label=f"training rollouts, mean of {WINDOW} updates")
        for curve in curves:
            panel.scatter(*zip(*curve.heldout, strict=True), color="#e2a35c", s=18, zorder=3)
        ends = [curve.heldout for curve in curves]
        places = [place for place, _ in ends[0]]
        rates = [sum(end[index][1] for end in ends) / len(ends) for index in range(len(places))]
        panel.plot(places, rates, color="#c2611f", marker="o", linewidth=2, label="held-out tasks, temperature 0.6")
        panel.axvline(places[1], color="#999999", linestyle=":", linewidth=1)
        panel.annotate("phase 2", (places[1], 1.0), xytext=(4, -10), textcoords="offset points", color="#666666")
        panel.set(title=f"{name} ({len(curves)} seeds)", xlabel="update", ylim=(0, 1))
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("share of episodes that succeed")
    panels[0][0].legend(loc="lower right", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smooth(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Means over the last WINDOW updates, by the number of updates."""
    means = [
        sum(part) / len(part) for part in (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    ]
    return list(range(1, len(values) + 1)), means
