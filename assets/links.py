"""Links to the progress of a running asset, shown in Dagster as an observation of the asset when it starts."""

from urllib.parse import urlencode

import dagster as dg

from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.tracking.runs import StageRun
from resources.desktops import VIEWER_VARIABLE
from resources.tracking import TrackingResource

STATUS_PAGE = "/status"
"""Page of an env server with screenshots of its desktops."""
VIEWER_URL = "http://127.0.0.1:8765"
"""Default address of `osworld-pipeline view`."""


def log_links(
    context: dg.AssetExecutionContext, tracking: TrackingResource, run: StageRun, servers: EnvServers | None
) -> None:
    """Reports links to the stage's curves in MLflow, its episodes in the trajectory viewer, and the desktops of remote
    env servers. The embedded env server ends with the asset, and only the asset has its token."""
    links = {"mlflow": dg.MetadataValue.url(tracking.run_url_of(run))}
    if servers is not None:
        address = dg.EnvVar(VIEWER_VARIABLE).get_value() or VIEWER_URL
        links |= {name: dg.MetadataValue.url(url) for name, url in viewer_links(address, run.run_id).items()}
    if servers is not None and not servers.is_embedded:
        for number, url in enumerate(servers.urls, start=1):
            address = url.removeprefix("dns+").rstrip("/")
            links[f"desktops {number}"] = dg.MetadataValue.url(f"{address}{STATUS_PAGE}")
    partition = str(context.partition_key) if context.has_partition_key else None
    context.log_event(dg.AssetObservation(asset_key=context.asset_key, partition=partition, metadata=links))


def viewer_links(viewer_url: str, mlflow_run_id: str) -> dict[str, str]:
    """Pages of the trajectory viewer for the episodes of a stage and the groups that it trains on. `mlflow_run_id` is
    the stage's run, not that of an attempt."""
    query = urlencode({"mlflow": mlflow_run_id})
    return {name: f"{viewer_url.rstrip('/')}/{name}?{query}" for name in ("episodes", "groups")}
