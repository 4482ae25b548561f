"""The jobs. All run in process: a trainer is already a separate process, and ends with the run."""

import dagster as dg

from assets.keys import key_of
from jobs.on_request import collect_rollouts, evaluate_tasks
from jobs.upkeep import collect_garbage
from resources.start import CHAMPION

TRAIN, EVALUATE, RANK = "train", "evaluate", "rank"

train = dg.define_asset_job(
    TRAIN,
    selection=dg.AssetSelection.groups("raw", "tables", "checkpoints"),
    description="The whole pipeline: raw datasets, union tables, verified replay, SFT, flywheel, GSPO phases 1 and 2. "
    "The sensor new_checkpoints evaluates its checkpoints.",
)

build_tables = dg.define_asset_job(
    "build_tables",
    selection=dg.AssetSelection.groups("raw", "tables"),
    description="Raw datasets to union tables and verified replay, without training.",
)

run_flywheel = dg.define_asset_job(
    "run_flywheel",
    selection=dg.AssetSelection.assets(key_of("flywheel_checkpoint")),
    description="Rounds of rollouts and SFT on the successful ones, from the current SFT checkpoint; resumes episode "
    "by episode.",
)

retrain = dg.define_asset_job(
    "retrain",
    selection=dg.AssetSelection.assets(
        key_of("flywheel_checkpoint"), key_of("gspo_phase1_checkpoint"), key_of("gspo_phase2_checkpoint")
    ),
    description="Flywheel and GSPO phases from the champion, within the recipe's budget ([retraining]); a run stopped "
    "by its budget continues in the next one. Started by retraining_schedule and the sensor retraining_is_due.",
    config={"resources": {"start": {"config": {"checkpoint": CHAMPION}}}},
)

evaluate = dg.define_asset_job(
    EVALUATE,
    selection=dg.AssetSelection.assets(key_of("evaluations")),
    description="One checkpoint on one suite; resumes task by task. Backfill any set of both.",
)

rank = dg.define_asset_job(
    RANK,
    selection=dg.AssetSelection.groups("evaluation") - dg.AssetSelection.assets(key_of("evaluations")),
    description="Leaderboard, champion and report from the existing evaluations.",
)

verify_replay = dg.define_asset_job(
    "verify_replay",
    selection=dg.AssetSelection.assets(key_of("verified_replay")),
    description="Executes the demonstrations of the replay buffer again; known results are not repeated.",
)

compact_trajectories = dg.define_asset_job(
    "compact_trajectories",
    selection=dg.AssetSelection.assets(key_of("compacted_trajectories")),
    description="Merges the small parts of the trajectory store into large sorted files, also during training.",
)

JOBS = [
    train,
    build_tables,
    run_flywheel,
    retrain,
    evaluate,
    rank,
    evaluate_tasks,
    collect_rollouts,
    verify_replay,
    compact_trajectories,
    collect_garbage,
]
