"""Where to look on while an asset works: shown in Dagster as an observation of the asset as soon as it has begun."""

import dagster as dg

from osworld_pipeline.lineage.tracking import StageRun
from osworld_pipeline.runs.embedded_server import EnvServers
from resources.tracking import TrackingResource

STATUS_PAGE = "/status"
"""Of an env server: its desktops, with their pictures."""


def tell_where_to_look(
    context: dg.AssetExecutionContext, tracking: TrackingResource, run: StageRun, servers: EnvServers | None
) -> None:
    """The stage's curves in MLflow, and the desktops of remote env servers. The embedded one ends with the asset, and
    nobody but the asset has its token."""
    links = {"mlflow": dg.MetadataValue.url(tracking.run_url_of(run))}
    if servers is not None and not servers.is_embedded:
        for number, url in enumerate(servers.urls, start=1):
            links[f"desktops {number}"] = dg.MetadataValue.url(f"{url.rstrip('/')}{STATUS_PAGE}")
    partition = str(context.partition_key) if context.has_partition_key else None
    context.log_event(dg.AssetObservation(asset_key=context.asset_key, partition=partition, metadata=links))
