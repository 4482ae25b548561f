"""Raw sources: demonstrations recorded on real desktops, and the files of spec 01 as they lie on disk."""

import dagster as dg

from osworld_pipeline.datasets.raw import REPLAY_SOURCES, TASK_SOURCES, Source, summarise_source
from osworld_pipeline.runs.record_sources import read_recording, recording_key
from resources.desktops import DesktopsResource
from resources.launcher import LocalLauncher
from resources.progress import ProgressResource
from resources.state import RecipeResource, StateResource

GROUP = "raw"


@dg.asset(group_name=GROUP, kinds={"python", "x11"}, pool="desktops")
def demonstrations(
    context: dg.AssetExecutionContext,
    state: StateResource,
    recipe: RecipeResource,
    desktops: DesktopsResource,
    launcher: LocalLauncher,
    progress: ProgressResource,
) -> dg.MaterializeResult:
    """Oracles solve the training tasks on real desktops; what they saw and said becomes the raw sources."""
    settings, folder = recipe.load(), state.dir()
    recording = read_recording(folder)
    if recording is None or recording.key != recording_key(settings):
        with desktops.serve(folder, settings) as servers:
            job = {
                "recipe": settings.model_dump(mode="json"),
                "state_root": str(folder.root),
                "servers": servers.as_job(),
            }
            launcher.launch(context, "record_sources", job, progress.listener(context, "demonstrations"), state=folder)
        recording = read_recording(folder)
        assert recording is not None, "the recording ended well and left no marker"
    return dg.MaterializeResult(metadata=recording.metadata(), data_version=dg.DataVersion(recording.key))


def build_raw_asset(source: Source) -> dg.AssetsDefinition:
    @dg.asset(
        name=f"raw_{source.name}",
        group_name=GROUP,
        kinds={"json"},
        deps=[demonstrations],
        description=f"{source.description} ({source.path})",
    )
    def raw_source(context: dg.AssetExecutionContext, state: StateResource) -> dg.MaterializeResult:
        summary = summarise_source(state.dir(), source)
        return dg.MaterializeResult(metadata=summary.metadata(), data_version=dg.DataVersion(summary.digest))

    return raw_source


RAW_ASSETS = [build_raw_asset(source) for source in (*REPLAY_SOURCES, *TASK_SOURCES)]
ASSETS = [demonstrations, *RAW_ASSETS]
