"""Collects the batch of an update. If too many episodes ended in faults, the update is held: the reason is recorded,
and groups run again after a pause, with the same names and seeds.

A synchronous phase runs all groups of the update again, so the final batch is the one that would have been collected
without the faults. An asynchronous one runs only the faulty groups again. A killed stage starts with the first try
again.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.domain.hold import HoldReason, hold_metrics
from osworld_pipeline.errors import EngineError, EnvServerError, EvaluatorError, PipelineError, TrainingError
from osworld_pipeline.recipes.schema import RolloutSection
from osworld_pipeline.rollout.batch import GspoBatch, as_held, merge_batches
from osworld_pipeline.rollout.collector import Collector
from osworld_pipeline.runs.gspo.metrics import group_metrics
from osworld_pipeline.runs.messages import Metrics, Report, Warned

Kind = TypeVar("Kind")

MAX_PAUSE_S = 600.0
JITTER = 0.5
"""Largest random share added to a pause, so that stages that share desktops do not resume together."""
_ERRORS: Mapping[Outcome, type[PipelineError]] = {
    Outcome.ENV_FAULT: EnvServerError,
    Outcome.POLICY_FAULT: EngineError,
    Outcome.GRADER_FAULT: EvaluatorError,
    Outcome.TIMEOUT: TrainingError,
    Outcome.TOUCHED: TrainingError,
}

Record = Callable[[GspoBatch], None]
"""Writes everything that ran for the update and replaces what was written for it before. Blocks; raises StoreError."""
Log = Callable[[Mapping[str, float]], None]
"""Writes the metrics of a held try into the update's row. Blocks; raises StoreError."""
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    batch: GspoBatch
    """The batch that the update trains on."""
    held: tuple[GspoBatch, ...]
    """What was discarded in the update's earlier held tries, in order."""

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
        EnvServerError, EngineError, EvaluatorError, TrainingError: the update was held `max_held_updates` times; names
            the most frequent fault.
        Also the exceptions of Collector.collect, `record` and `log`.
    """
    held: tuple[GspoBatch, ...] = ()
    for num_try in itertools.count(1):
        batch = await collector.collect(update)
        if batch.fault_share <= section.max_fault_share:
            collected = Collected(batch=batch, held=held)
            await asyncio.to_thread(record, collected.whole)
            return collected
        reason = hold_reason(batch.episodes, section.max_fault_share)
        discarded = as_held(await collector.hold(batch, update=update), reason, update=update, num_try=num_try)
        await asyncio.to_thread(record, merge_batches([*held, discarded]))
        metrics = {
            **group_metrics(as_held(batch, reason, update=update, num_try=num_try), update=update),
            **hold_metrics(HoldReason.FAULTS),
            "num_held_tries": float(num_try),
        }
        await asyncio.to_thread(log, metrics)
        report(Metrics(update=update + 1, metrics=metrics))
        if num_try >= section.max_held_updates:
            raise held_too_often(batch.episodes, reason, update=update, num_tries=num_try)
        pause_s = next_pause_s(section.held_pause_s, num_try)
        report(
            Warned(
                message=f"update {update + 1} is held: {reason}; the policy's weights stay unchanged, and groups run "
                f"again in {pause_s:.0f} s (held {num_try} of {section.max_held_updates} times)"
            )
        )
        await pause(pause_s)
        late = as_held(await collector.resume(update), reason, update=update, num_try=num_try)
        held = (*held, merge_batches([discarded, late]))
    raise AssertionError("unreachable: the loop above has no end")


def hold_reason(episodes: Sequence[Episode], max_fault_share: float) -> str:
    """One clause: how many episodes ended in faults, and the most frequent fault."""
    faulty = [one for one in episodes if not one.outcome.is_valid]
    outcome, count = _commonest([one.outcome for one in faulty])
    error, _ = _commonest([one.error for one in faulty if one.outcome is outcome])
    return (
        f"{len(faulty)} of {len(episodes)} episodes ended in faults, more than rollout.max_fault_share = "
        f"{max_fault_share:g} allows; the most frequent was {outcome} ({count} times): {error}"
    )


def held_too_often(episodes: Sequence[Episode], reason: str, *, update: int, num_tries: int) -> PipelineError:
    """The exception class of the most frequent fault."""
    outcome, _ = _commonest([one.outcome for one in episodes if not one.outcome.is_valid])
    return _ERRORS[outcome](
        f"update {update + 1} was held {num_tries} times in a row (rollout.max_held_updates): {reason}. The policy's "
        "weights are unchanged. Fix the cause and run again: training resumes from the last checkpoint of the stage"
    )


def next_pause_s(first_pause_s: float, num_try: int) -> float:
    """The pause after try number `num_try`."""
    longest = min(MAX_PAUSE_S, first_pause_s * 2 ** min(num_try - 1, 30))
    return longest * random.uniform(1.0, 1.0 + JITTER)


def _commonest(found: Sequence[Kind]) -> tuple[Kind, int]:
    """Returns the first of equally frequent values."""
    return Counter(found).most_common(1)[0]
