"""Checks of the data before training and of the trained checkpoints, and warnings: each check calls one library
function. A failed blocking check stops the assets downstream."""

from collections.abc import Callable

import dagster as dg

from assets.keys import key_of
from assets.metadata import check_result
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.evaluate.leaderboard import worse_than_their_parents
from osworld_pipeline.runs.upkeep import invariants
from osworld_pipeline.runs.upkeep.invariants import Violations
from osworld_pipeline.tables.query import run_query
from resources.state import StateResource

WARN = dg.AssetCheckSeverity.WARN


def build_check(
    name: str,
    asset: str,
    find: Callable[[StateDir], Violations],
    *,
    holds: str,
    otherwise: str,
    warns: bool = False,
) -> dg.AssetChecksDefinition:
    """A check that passes if `find` returns nothing. `otherwise`: the remedy. With `warns` it does not block."""

    @dg.asset_check(name=name, asset=key_of(asset), description=holds, blocking=not warns)
    def check(state: StateResource) -> dg.AssetCheckResult:
        severity = WARN if warns else dg.AssetCheckSeverity.ERROR
        return check_result(find(state.dir()), severity=severity, what_to_do=otherwise)

    return check


def build_query_check(name: str, asset: str, sql: str, *, holds: str, otherwise: str, warns: bool = False):
    """A check that passes if the SQL query returns no row; the rows are the violations."""
    return build_check(
        name, asset, lambda state: invariants.find_violations(state, sql), holds=holds, otherwise=otherwise, warns=warns
    )


@dg.asset_check(asset=key_of("train_tasks"), description="There is a task to train on.", blocking=True)
def there_are_training_tasks(state: StateResource) -> dg.AssetCheckResult:
    count = run_query(state.dir(), "SELECT count(*) FROM train_tasks").rows[0][0]
    return dg.AssetCheckResult(passed=count > 0, metadata={"rows": count})


CHECKS = [
    build_check(
        "task_ids_are_unique",
        "union_tasks",
        invariants.task_ids_twice,
        holds="A domain and an id name one task, and no task has the id of a chunk.",
        otherwise="remove union_tasks.parquet and materialize union_tasks again",
    ),
    there_are_training_tasks,
    build_query_check(
        "training_tasks_can_be_run",
        "train_tasks",
        invariants.UNFIT_TRAIN_TASKS,
        holds="Every training task has a config and a demonstration, and is a Windows task only in a Windows suite.",
        otherwise="remove train_tasks.parquet and materialize train_tasks again",
    ),
    build_check(
        "replay_rows_can_be_read",
        "replay_buffer",
        invariants.unreadable_replay_rows,
        holds="Every turn of every demonstration is an action in the row's dialect.",
        otherwise="materialize replay_buffer again: unparsable rows become rejects",
    ),
    build_check(
        "no_blob_is_missing",
        "replay_buffer",
        invariants.missing_images,
        holds="Every image that a row refers to is in the store.",
        otherwise="restore the blobs from a copy, or remove replay_buffer.parquet and materialize it again",
    ),
    build_query_check(
        "few_records_are_rejected",
        "replay_buffer",
        invariants.SOURCES_OF_REJECTS,
        holds=f"No source of at least {invariants.MIN_RECORDS} records loses more than "
        f"{invariants.MAX_REJECT_SHARE:.0%} of them.",
        otherwise="look at the table rejects: SELECT kind, reason, count(*) FROM rejects GROUP BY ALL",
        warns=True,
    ),
    build_check(
        "demonstrations_earn_their_reward",
        "verified_replay",
        invariants.false_demonstrations,
        holds=f"At most {invariants.MAX_FAILED_SHARE:.0%} of the demonstrations that were executed again failed.",
        otherwise="set replay.require_verified, or remove the source of the failed demonstrations",
        warns=True,
    ),
    *(
        build_query_check(
            "training_was_sound",
            asset,
            invariants.UNSOUND_TRAINING,
            holds=f"Loss and gradients are finite, KL is at most {invariants.MAX_KL:g}, and sampler and trainer agree "
            f"on log-probabilities within {invariants.MAX_SAMPLER_DIFF:g}.",
            otherwise="lower the learning rate or raise gspo.kl_coef; if sampler and trainer differ, "
            "update the policy server to the trainer's processor version and precision",
        )
        for asset in ("sft_checkpoint", "gspo_phase1_checkpoint", "gspo_phase2_checkpoint")
    ),
    build_check(
        "no_checkpoint_fell_behind_its_parent",
        "leaderboard",
        worse_than_their_parents,
        holds="No checkpoint is worse than its parent by more than the interval of a paired comparison.",
        otherwise="look at its regressions task by task and at its training curves, in the report of its training run",
        warns=True,
    ),
    build_query_check(
        "no_orphan_injection",
        "gspo_phase2_checkpoint",
        invariants.ORPHAN_INJECTIONS,
        holds="The group and the replay row of every injection exist.",
        otherwise="restore the trajectory store from a copy, or restore the sources of the missing replay rows and "
        "materialize replay_buffer again",
        warns=True,
    ),
    build_query_check(
        "episodes_have_their_steps",
        "evaluations",
        invariants.EPISODES_WITHOUT_THEIR_STEPS,
        holds="Every episode has exactly the steps it counts, and no step is without an episode.",
        otherwise="a part of the trajectory store was damaged or removed by hand: restore it from a copy",
        warns=True,
    ),
]
