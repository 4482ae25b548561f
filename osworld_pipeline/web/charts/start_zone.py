"""The band in a curve of success over updates for the checkpoint that the training started from: its success rate, with
the spread over evaluation seeds. A curve inside it shows no change."""

from collections.abc import Sequence

from osworld_pipeline.evaluation.effect import SeedSpread
from osworld_pipeline.evaluation.scores import EvalRow, rates_by_seed, summarise
from osworld_pipeline.web.charts.plots import Zone


def start_zone(rows: Sequence[EvalRow], *, confidence: float, colour: int = 0) -> Zone | None:
    """`rows`: one evaluation of the start. None if it has fewer than two seeds: its spread is unknown."""
    spread = SeedSpread.of(rates_by_seed(rows), confidence=confidence)
    if spread is None:
        return None
    low, high = spread.band(summarise(rows, confidence=confidence).success_rate)
    name = f"spread of the start {rows[0].checkpoint_id} over {len(spread.rates)} evaluation seeds, at {confidence:.0%}"
    return Zone(name=name, low=low, high=high, colour=colour)
