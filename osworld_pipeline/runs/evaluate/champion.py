"""Chooses the champion checkpoint by paired tests on the recipe's held-out tasks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.evaluation.breakdown import compare_tasks
from osworld_pipeline.evaluation.scores import EvalRow, is_mixed, read_evals, summarise
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.checkpoints.registry import all_checkpoints
from osworld_pipeline.runs.evaluate.plan import plan_evaluation


@dataclass(frozen=True, kw_only=True)
class Choice:
    checkpoint_id: str | None
    """None if no checkpoint qualifies yet."""
    is_new: bool
    reason: str


def choose_champion(state: StateDir, recipe: Recipe, *, current: str | None) -> Choice:
    """`current`: the current champion. A checkpoint qualifies if its evaluation is complete and used the champion's
    desktop image and grader (without an evaluated champion: those that most checkpoints used). Without a champion the
    best of them is chosen. Base and external checkpoints, which were not trained here, do not qualify. Raises
    TableError."""
    rows = _whole_evaluations(state, recipe)
    challengers = {name: evals for name, evals in rows.items() if name != current}
    if not challengers:
        reason = (
            f"{current} stays: it has no challenger" if current else "no trained checkpoint has a whole evaluation yet"
        )
        return Choice(checkpoint_id=current, is_new=False, reason=reason)
    desktops = rows[current][0].desktops if current in rows else _usual_desktops(challengers)
    challengers = {name: evals for name, evals in challengers.items() if evals[0].desktops == desktops}
    if not challengers:
        reason = (
            f"{current} stays: no other checkpoint was evaluated with its desktop image and grader ({desktops}); "
            f"evaluate {current} again"
        )
        return Choice(checkpoint_id=current, is_new=False, reason=reason)
    rates = {name: summarise(evals).success_rate for name, evals in challengers.items()}
    best = max(sorted(challengers), key=lambda name: rates[name])
    if current is None:
        reason = f"{best} is the first champion, at {rates[best]:.1%}"
        return Choice(checkpoint_id=best, is_new=True, reason=reason)
    if current not in rows:
        reason = f"{current} stays: it has no whole evaluation under these settings to compare with; evaluate it"
        return Choice(checkpoint_id=current, is_new=False, reason=reason)
    comparison = compare_tasks(rows[current], challengers[best], confidence=recipe.evaluation.confidence).comparison
    if comparison is None:
        reason = f"{current} stays: it has no task in common with {best}"
        return Choice(checkpoint_id=current, is_new=False, reason=reason)
    difference = (
        f"{best} against {current}: {100 * comparison.difference:+.1f} points "
        f"({100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}, {comparison.num_tasks} tasks)"
    )
    if comparison.is_better:
        return Choice(checkpoint_id=best, is_new=True, reason=f"{difference}: better")
    return Choice(checkpoint_id=current, is_new=False, reason=f"{difference}: not proven better, {current} stays")


def _whole_evaluations(state: StateDir, recipe: Recipe) -> dict[str, Sequence[EvalRow]]:
    """The rows of each checkpoint. Includes only checkpoints trained here, with a valid episode for each planned one,
    all graded on one desktop image by one version of the grader."""
    plans = {
        one.checkpoint_id: plan_evaluation(recipe, one.checkpoint_id)
        for one in all_checkpoints(state)
        if one.stage not in (Stage.BASE, Stage.EXTERNAL)
    }
    keys = {plan.stage_key: checkpoint_id for checkpoint_id, plan in plans.items()}
    found: dict[str, list[EvalRow]] = {}
    for row in read_evals(state, stage_keys=keys):
        if row.is_valid:
            found.setdefault(keys[row.stage_key], []).append(row)
    return {
        name: rows
        for name, rows in found.items()
        if len(rows) == len(plans[name].episodes) and not is_mixed(rows[0].desktops)
    }


def _usual_desktops(rows: Mapping[str, Sequence[EvalRow]]) -> str:
    """The image and grader that most checkpoints were evaluated with."""
    return Counter(sorted(evals[0].desktops for evals in rows.values())).most_common(1)[0][0]
