"""What Prometheus reads of a gateway's sandboxes."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from env_server.gateway_server.sandboxes import SandboxTable
from osworld_pipeline.wire import metric_families as families


def readings_of(sandboxes: SandboxTable) -> Iterator[Metric]:
    yield families.SANDBOXES.reading(sandboxes.num_taken)
    yield families.QUOTA.reading(sandboxes.quota)
    ends = families.SANDBOX_ENDS.reading()
    ends.add_metric(("started",), sandboxes.num_started)
    ends.add_metric(("refused",), sandboxes.num_refused)
    ends.add_metric(("reaped",), sandboxes.num_reaped)
    yield ends
