"""The union tables: every task seen anywhere, the replay buffer, and the tasks that can be trained on."""

import dagster as dg

from assets.raw import RAW_ASSETS
from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.datasets.union import build_union, write_union
from osworld_pipeline.runs.stages import training_data_digest
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query
from resources.state import RecipeResource, StateResource

GROUP = "tables"
DESCRIPTIONS = {
    "union_tasks": "One row for each task id seen in any source, with its config where one is known.",
    "replay_buffer": "Every demonstration whose turns all parse, deduplicated, with the line it came from.",
    "train_tasks": "The tasks that have a config, are no Windows tasks and have a demonstration.",
}


@dg.multi_asset(
    specs=[
        dg.AssetSpec(
            name, group_name=GROUP, kinds={"duckdb", "parquet"}, deps=RAW_ASSETS, description=DESCRIPTIONS[name]
        )
        for name in DESCRIPTIONS
    ],
    pool="catalog",
)
def union_tables(context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource):
    """One pass over all raw sources makes the three tables."""
    settings, folder = recipe.load(), state.dir()
    system_prompt = load_dialect(settings.agent.dialect).system_prompt(settings.agent.system_prompt)
    result = build_union(folder, system_prompt=system_prompt, dialect=settings.agent.dialect)
    write_union(folder, result)
    rebuild_catalog(folder)
    rows = {"union_tasks": result.tasks, "replay_buffer": result.replay, "train_tasks": result.train_tasks}
    for name, table in rows.items():
        yield dg.MaterializeResult(
            asset_key=name,
            metadata={
                "dagster/row_count": table.num_rows,
                "table": name,
                "catalog": dg.MetadataValue.path(str(folder.catalog)),
                "stats": dg.MetadataValue.json(dict(result.stats)),
            },
            data_version=dg.DataVersion(training_data_digest(folder, [name])),
        )


@dg.asset_check(asset="union_tasks", description="A task id names one task.", blocking=True)
def task_ids_are_unique(state: StateResource) -> dg.AssetCheckResult:
    sql = "SELECT task_id, count(*) AS n FROM tasks GROUP BY 1 HAVING n > 1"
    twice = [row[0] for row in run_query(state.dir(), sql).rows]
    return dg.AssetCheckResult(passed=not twice, metadata={"twice": twice})


@dg.asset_check(asset="train_tasks", description="There is something to train on.", blocking=True)
def there_are_training_tasks(state: StateResource) -> dg.AssetCheckResult:
    count = run_query(state.dir(), "SELECT count(*) FROM train_tasks").rows[0][0]
    return dg.AssetCheckResult(passed=count > 0, metadata={"rows": count})


ASSETS = [union_tables]
CHECKS = [task_ids_are_unique, there_are_training_tasks]
