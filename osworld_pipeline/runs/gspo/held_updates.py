"""Collects what an update trains on. Where too many episodes ended in faults, the update is held: it is on record with
its reason, and its groups run again after a pause.

A try runs the same groups under the same names and seeds, so that what is trained in the end is what would have been
trained without the faults. A killed stage begins again with the first try.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.hold import HoldReason, hold_metrics
from osworld_pipeline.errors import EngineError, EnvServerError, EvaluatorError, PipelineError, TrainingError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch, as_held, merge_batches
from osworld_pipeline.rollout.collector import Collector
from osworld_pipeline.runs.gspo.metrics import group_metrics

Kind = TypeVar("Kind")

MAX_PAUSE_S = 600.0
JITTER = 0.5
"""Of a pause, added by chance: stages that share desktops do not come back together."""
_ERRORS: Mapping[Outcome, type[PipelineError]] = {
    Outcome.ENV_FAULT: EnvServerError,
    Outcome.POLICY_FAULT: EngineError,
    Outcome.GRADER_FAULT: EvaluatorError,
    Outcome.TIMEOUT: TrainingError,
}

Record = Callable[[GspoBatch], None]
"""Writes all that ran for the update, in the place of what was written for it before. Blocks; raises StoreError."""
Log = Callable[[Mapping[str, float]], None]
"""Writes the figures of a held try into the update's row. Blocks; raises StoreError."""
Report = Callable[[Mapping[str, Any]], None]
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    batch: GspoBatch
    """What the update trains on."""
    held: tuple[GspoBatch, ...]
    """Its held tries before that, one after the other."""

    @property
    def whole(self) -> GspoBatch:
        return merge_batches([*self.held, self.batch])


async def collect_update(
    collector: Collector,
    update: int,
    section: RolloutSection,
    *,
    record: Record,
    log: Log,
    report: Report,
    pause: Pause = asyncio.sleep,
) -> Collected:
    """
    Raises:
        EnvServerError, EngineError, EvaluatorError, TrainingError: the update was held `max_held_updates` times; says
            which fault was the commonest.
        and as Collector.collect, and what `record` and `log` raise.
    """
    held: tuple[GspoBatch, ...] = ()
    for num_try in itertools.count(1):
        batch = await collector.collect(update)
        if batch.fault_share <= section.max_fault_share:
            collected = Collected(batch=batch, held=held)
            await asyncio.to_thread(record, collected.whole)
            return collected
        reason = hold_reason(batch.episodes, section.max_fault_share)
        given_up = await collector.hold(update)
        tried = as_held(batch, reason, update=update, num_try=num_try)
        given_up = as_held(given_up, f"given up with others: {reason}", update=update, num_try=num_try)
        held = (*held, merge_batches([tried, given_up]))
        await asyncio.to_thread(record, merge_batches(held))
        metrics = {
            **group_metrics(tried, update=update),
            **hold_metrics(HoldReason.FAULTS),
            "num_held_tries": float(num_try),
        }
        await asyncio.to_thread(log, metrics)
        report({"kind": "metrics", "update": update + 1, "metrics": metrics})
        if num_try >= section.max_held_updates:
            raise held_too_often(batch.episodes, reason, update=update, num_tries=num_try)
        pause_s = next_pause_s(section.held_pause_s, num_try)
        report(
            {
                "kind": "warning",
                "message": f"update {update + 1} is held: {reason}; its weights stay as they are, and its groups run "
                f"again in {pause_s:.0f} s (held {num_try} of {section.max_held_updates} times)",
            }
        )
        await pause(pause_s)
        await collector.advance(update)
    raise AssertionError("unreachable: the loop above has no end")


def hold_reason(episodes: Sequence[Episode], max_fault_share: float) -> str:
    """One clause: how many of them ended in faults, and the commonest."""
    faulty = [one for one in episodes if not one.outcome.is_valid]
    outcome, count = _commonest([one.outcome for one in faulty])
    error, _ = _commonest([one.error for one in faulty if one.outcome is outcome])
    return (
        f"{len(faulty)} of {len(episodes)} episodes ended in faults, more than rollout.max_fault_share = "
        f"{max_fault_share:g} allows; the commonest was {outcome} ({count} times): {error}"
    )


def held_too_often(episodes: Sequence[Episode], reason: str, *, update: int, num_tries: int) -> PipelineError:
    """Of the boundary of the commonest fault."""
    outcome, _ = _commonest([one.outcome for one in episodes if not one.outcome.is_valid])
    return _ERRORS[outcome](
        f"update {update + 1} was held {num_tries} times in a row (rollout.max_held_updates): {reason}. The weights "
        "are those of the update before: put that right and run again, training goes on from its last checkpoint"
    )


def next_pause_s(first_pause_s: float, num_try: int) -> float:
    """After the `num_try`th try."""
    longest = min(MAX_PAUSE_S, first_pause_s * 2 ** min(num_try - 1, 30))
    return longest * random.uniform(1.0, 1.0 + JITTER)


def _commonest(found: Sequence[Kind]) -> tuple[Kind, int]:
    """The first of those."""
    return Counter(found).most_common(1)[0]
