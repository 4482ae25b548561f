"""Shows what a training changed: each checkpoint compared with earlier ones, the task families that changed, and the
contribution of replay."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from osworld_pipeline.domain.checkpoint import Stage
from osworld_pipeline.evaluation.changes import Change
from osworld_pipeline.evaluation.effect import ONE_RUN
from osworld_pipeline.evaluation.replay_share import ReplayShare
from osworld_pipeline.web.formats import counted, points, words
from osworld_pipeline.web.names import stage_name


def show_changes(changes: Sequence[Change], replay: ReplayShare, console: Console) -> None:
    """Prints the comparisons; parts that were not compared are omitted."""
    compared = [change for change in changes if change.effect is not None]
    if compared:
        console.print()
        _show_comparisons(compared, console)
    last = [change for change in compared if change.stages == (Stage.SFT, Stage.GSPO_PHASE2)]
    for change in last:
        console.print("\n".join(_family_lines(change)), highlight=False, soft_wrap=True)
    if replay.num_groups:
        console.print(_replay_line(replay), highlight=False, soft_wrap=True)
    if compared:
        console.print(ONE_RUN, style="bold", highlight=False)


def _show_comparisons(changes: Sequence[Change], console: Console) -> None:
    """A title, and the table of changes. If all lines have the same number of tasks and seeds, it is in the title, so
    that a narrow terminal suffices. A table's own title would be wrapped to the width of the table."""
    effects = [change.effect for change in changes if change.effect is not None]
    sizes = [(effect.comparison.num_tasks, change.num_seeds) for change, effect in zip(changes, effects, strict=True)]
    is_same = len(set(sizes)) == 1
    of = f": {counted(sizes[0][0], 'task')}, {counted(sizes[0][1], 'evaluation seed')}" if is_same else ""
    title = f"What changed on held-out tasks, paired by task{of}"
    console.print(title, style="table.title", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    size_columns = () if is_same else ("tasks", "eval seeds")
    for name in ("points", f"{effects[0].comparison.confidence:.0%} interval", *size_columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for change, effect, size in zip(changes, effects, sizes, strict=True):
        it = effect.comparison
        table.add_row(
            _title(change),
            points(it.difference),
            f"{points(it.low)}, {points(it.high)}",
            *(() if is_same else map(str, size)),
            effect.words,
        )
    console.print(table)


def _family_lines(change: Change) -> list[str]:
    """One line for each family that changed, and one for the others."""
    moved = [one for one in change.families if one.difference]
    same = [words(one.family) for one in change.families if not one.difference]
    width = max((len(one.family) for one in moved), default=0)
    lines = [f"Families of tasks, {_title(change)}:"]
    lines += [
        f"  {words(one.family):{width}}  {100 * one.difference:+6.1f} points, "
        f"{one.before_successes}/{one.before_n} to {one.after_successes}/{one.after_n}"
        for one in moved
    ]
    if same:
        lines.append(f"  no change: {', '.join(same) if moved else 'all of them'}")
    return lines


def _replay_line(replay: ReplayShare) -> str:
    if not replay.num_injected:
        return f"Replay: no recorded success joined any of {replay.num_groups} groups."
    return (
        f"Replay: a recorded success joined {replay.num_injected} of {replay.num_groups} groups, of "
        f"{counted(replay.num_tasks, 'task')}; {replay.num_solved_later} of these tasks "
        "were solved for the first time after that, by the policy alone."
    )


def _title(change: Change) -> str:
    before, after = (stage_name(stage).removeprefix("GSPO ") for stage in change.stages)
    return f"{after} against {before}"
