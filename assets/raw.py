"""Raw sources: demonstrations recorded on real desktops, Slime-OSWorld's files on disk, and imports."""

import dagster as dg

from assets.keys import PREFIX
from assets.metadata import reject_metadata
from assets.retries import FAULT_RETRIES, only_after_faults
from osworld_pipeline.datasets.raw import REPLAY_SOURCES, TASK_SOURCES, Source
from osworld_pipeline.runs.code_version import code_version
from osworld_pipeline.runs.job import DesktopJob
from osworld_pipeline.runs.sources.record_sources import read_recording, recording_key
from osworld_pipeline.runs.sources.replay_import import sync_replay_import
from osworld_pipeline.runs.sources.source_summaries import READERS, look_at_imports, look_at_source
from osworld_pipeline.tables.preview import markdown_table
from resources.desktops import DesktopsResource
from resources.launcher import Launcher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

GROUP = "raw"
RECORD = dg.TableSchema(
    columns=[
        dg.TableColumn("task_id", "string", "Also at id, metadata.task_id or metadata.id."),
        dg.TableColumn("messages", "list", "Chat turns, also at conversations: role, and content as text or parts."),
        dg.TableColumn("images", "list<string>", "Base64, data URIs or paths, in the order of the placeholders."),
        dg.TableColumn("reward", "double", "If the record has one."),
    ]
)
TASK = dg.TableSchema(
    columns=[
        dg.TableColumn("task_id", "string", "Also at id."),
        dg.TableColumn("instruction", "string", "Instruction for the agent."),
        dg.TableColumn("task_config", "json", "The whole OSWorld task, if the source has it."),
    ]
)


@dg.asset(key_prefix=PREFIX, group_name=GROUP, kinds={"python", "x11"}, pool="desktops", retry_policy=FAULT_RETRIES)
@only_after_faults
def demonstrations(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    launcher: Launcher,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Oracles solve the training tasks on real desktops; their observations and responses become the raw sources."""
    settings, folder = recipe.load(), state.dir()
    recording = read_recording(folder)
    if recording is None or recording.key != recording_key(settings):
        with desktops.serve(folder, settings, run_id=context.run.run_id) as servers:
            job = DesktopJob(recipe=settings, state_root=folder.root, servers=servers)
            launcher.launch(context, "record_sources", job, progress.listener(context, "demonstrations"), state=folder)
        recording = read_recording(folder)
        assert recording is not None, "the recording succeeded without a marker"
    return dg.MaterializeResult(
        metadata={"dagster/row_count": recording.num_demonstrations, **recording.metadata()},
        data_version=dg.DataVersion(recording.key),
    )


def build_raw_asset(source: Source) -> dg.AssetsDefinition:
    @dg.asset(
        name=f"raw_{source.name}",
        key_prefix=PREFIX,
        group_name=GROUP,
        kinds={"json"},
        deps=[demonstrations],
        code_version=code_version(*READERS),
        description=f"{source.description} ({source.path})",
    )
    def raw_source(context: dg.AssetExecutionContext, state: StateResource) -> dg.MaterializeResult:
        found = look_at_source(state.dir(), source)
        return dg.MaterializeResult(
            metadata={
                "dagster/row_count": found.num_records,
                "dagster/column_schema": RECORD if source.kind == "demonstrations" else TASK,
                "present": found.is_present,
                "tasks": found.num_tasks,
                "bytes": found.num_bytes,
                "path": found.path,
                "unchanged": found.is_cached,
                **reject_metadata(list(found.rejects), found.num_rejects),
            },
            data_version=dg.DataVersion(found.digest),
        )

    return raw_source


@dg.asset(key_prefix=PREFIX, group_name=GROUP, kinds={"json"})
def imports(context: dg.AssetExecutionContext, state: StateResource, recipe: RecipeResource) -> dg.MaterializeResult:
    """External demonstrations, imported by `osworld-pipeline import` or the recipe's replay.import_file; each with its
    licence and revision."""
    sync_replay_import(state.dir(), recipe.load().replay.import_file)
    found = look_at_imports(state.dir())
    columns = ("name", "importer", "demonstrations", "tasks", "rejects", "licence", "revision", "origin")
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": found.num_demonstrations,
            "dagster/column_schema": RECORD,
            "imports": dg.MetadataValue.md(markdown_table(columns, found.rows)),
            **reject_metadata(list(found.rejects), found.num_rejects),
        },
        data_version=dg.DataVersion(found.digest),
    )


RAW_ASSETS = [*(build_raw_asset(source) for source in (*REPLAY_SOURCES, *TASK_SOURCES)), imports]
ASSETS = [demonstrations, *RAW_ASSETS]
