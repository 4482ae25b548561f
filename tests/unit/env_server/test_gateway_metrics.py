"""The metrics about a gateway's sandboxes that Prometheus reads."""

from functools import partial

from gateway_doubles import gateway
from scraped import samples_of

from env_server.gateway_server.readings import readings_of
from osworld_pipeline.wire.server_metrics import ServerMetrics


async def test_metrics_show_the_sandboxes_their_quota_and_the_outcome_of_each_start() -> None:
    async with gateway(quota=1) as there:
        metrics = ServerMetrics(partial(readings_of, there.table))
        assert (await there.http.post("/v1/sandboxes")).status_code == 201
        assert (await there.http.post("/v1/sandboxes")).status_code == 429
        found = samples_of(metrics.text().decode())
    assert (found["osworld_gateway_sandboxes"], found["osworld_gateway_quota"]) == (1, 1)
    ends = {end: found[f"osworld_gateway_starts_total {end}"] for end in ("started", "refused", "reaped")}
    assert ends == {"started": 1, "refused": 1, "reaped": 0}
