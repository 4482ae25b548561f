"""The Prometheus metrics of a weights receiver that a user started."""

import socket
from pathlib import Path

import httpx
from scraped import scrape
from weights_receiver import TOKEN, receiving

from osworld_pipeline.wire.metrics_endpoint import VARIABLE


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_the_bytes_of_uploads_and_their_times_are_served_at_the_named_port(tmp_path: Path) -> None:
    port = free_port()
    with receiving(tmp_path / "weights", environment={VARIABLE: str(port)}) as receiver:
        answer = httpx.put(
            f"{receiver.url}/v1/uploads/u1/model.safetensors",
            content=b"w" * 1000,
            headers={"Authorization": f"Bearer {TOKEN}"},
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{receiver.url}/v1/weights/w", trust_env=False).status_code == 401
        found = scrape(f"127.0.0.1:{port}")
    assert found["osworld_http_received_bytes_total write"] == 1000
    assert found["osworld_http_requests_total PUT write 200"] == 1
    assert found["osworld_http_request_seconds_count write"] == 1
    assert found["osworld_http_requests_total GET none 401"] == 1
