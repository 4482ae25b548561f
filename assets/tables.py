"""The union tables: all tasks of all sources, the replay buffer, and the tasks that can be trained on."""

import dagster as dg

from assets.keys import key_of
from assets.metadata import rejects_table_metadata, table_metadata
from assets.raw import RAW_ASSETS
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.sources.union_build import MODULES, ensure_union
from osworld_pipeline.tables.catalog import rebuild_catalog
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

GROUP = "tables"
DESCRIPTIONS = {
    "union_tasks": "One row for each task (domain and id) of any source, with its config if known.",
    "replay_buffer": "Every demonstration whose turns all parse, deduplicated, with the line it came from.",
    "train_tasks": "The tasks that have a config and a demonstration; Windows tasks only of a Windows suite.",
}


@dg.multi_asset(
    specs=[
        dg.AssetSpec(
            key_of(name),
            group_name=GROUP,
            kinds={"duckdb", "parquet"},
            deps=RAW_ASSETS,
            description=DESCRIPTIONS[name],
            code_version=code_version(*MODULES),
        )
        for name in DESCRIPTIONS
    ],
    pool="catalog",
)
def union_tables(
    context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource, progress: ProgressResource
):
    """One pass over all raw sources makes the three tables; unchanged sources make none."""
    folder = state.dir()
    built = ensure_union(folder, recipe.load(), on_progress=progress.byte_counter(context, "union tables"))
    context.log.info("nothing has changed: the tables are reused" if built.is_reused else "the tables are built")
    rebuild_catalog(folder)
    for name in DESCRIPTIONS:
        yield dg.MaterializeResult(
            asset_key=key_of(name),
            metadata={
                **table_metadata(folder, name),
                "unchanged": built.is_reused,
                "stats": dg.MetadataValue.json(dict(built.stats)),
                **(rejects_table_metadata(folder) if name == "replay_buffer" else {}),
            },
            data_version=dg.DataVersion(built.tables[name].data_version),
        )


ASSETS = [union_tables]
