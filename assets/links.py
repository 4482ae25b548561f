"""Where to look on while an asset works: shown in Dagster as an observation of the asset as soon as it has begun."""

from urllib.parse import urlencode

import dagster as dg

from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.tracking.runs import StageRun
from resources.tracking import TrackingResource

STATUS_PAGE = "/status"
"""Of an env server: its desktops, with their pictures."""
VIEWER_VARIABLE = "OSWORLD_VIEWER_URL"
VIEWER_URL = "http://127.0.0.1:8765"
"""Of `osworld-pipeline view`, where the variable does not say another one."""


def tell_where_to_look(
    context: dg.AssetExecutionContext, tracking: TrackingResource, run: StageRun, servers: EnvServers | None
) -> None:
    """The stage's curves in MLflow, what it plays in the trajectory viewer, and the desktops of remote env servers. The
    embedded one ends with the asset, and only the asset has its token."""
    links = {"mlflow": dg.MetadataValue.url(tracking.run_url_of(run))}
    if servers is not None:
        address = dg.EnvVar(VIEWER_VARIABLE).get_value() or VIEWER_URL
        links |= {name: dg.MetadataValue.url(url) for name, url in viewer_links(address, run.run_id).items()}
    if servers is not None and not servers.is_embedded:
        for number, url in enumerate(servers.urls, start=1):
            links[f"desktops {number}"] = dg.MetadataValue.url(f"{url.rstrip('/')}{STATUS_PAGE}")
    partition = str(context.partition_key) if context.has_partition_key else None
    context.log_event(dg.AssetObservation(asset_key=context.asset_key, partition=partition, metadata=links))


def viewer_links(viewer_url: str, mlflow_run_id: str) -> dict[str, str]:
    """Where the trajectory viewer shows what a stage plays: its episodes, and the groups that it trains on. MLflow's
    run is the stage's own, whichever attempt at it is told of."""
    query = urlencode({"mlflow": mlflow_run_id})
    return {name: f"{viewer_url.rstrip('/')}/{name}?{query}" for name in ("episodes", "groups")}
