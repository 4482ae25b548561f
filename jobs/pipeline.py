"""The jobs. All run in process: a trainer is a process of its own already, and dies with the run."""

import dagster as dg

train_and_evaluate = dg.define_asset_job(
    "train_and_evaluate",
    selection=dg.AssetSelection.all(),
    description="The whole road: raw datasets, union tables, SFT, GSPO phases 1 and 2, evaluations, report.",
    tags={"dagster/max_retries": "0"},
)

build_tables = dg.define_asset_job(
    "build_tables",
    selection=dg.AssetSelection.groups("raw", "tables"),
    description="Raw datasets to union tables, without training.",
    tags={"dagster/max_retries": "0"},
)

evaluate_checkpoints = dg.define_asset_job(
    "evaluate_checkpoints",
    selection=dg.AssetSelection.groups("evaluation"),
    description="Held-out success of the checkpoints there are; resumes task by task.",
    tags={"dagster/max_retries": "0"},
)

JOBS = [train_and_evaluate, build_tables, evaluate_checkpoints]
