"""/healthz, /readyz and /metrics: the answers that a load balancer and Prometheus get."""

from fake_desktops import until
from prometheus_client.parser import text_string_to_metric_families
from served_app import Server, fault, serving
from surface_server import CRASHING, TASK

from osworld_pipeline.errors import ReplicaError


async def samples(server: Server) -> dict[str, float]:
    """Each sample by its name and label values."""
    text = (await server.http.get("/metrics")).text
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_ready_while_a_replica_is_warm_or_leased_and_not_while_draining() -> None:
    async with serving() as server:
        assert (await server.http.get("/readyz")).json() == {
            "status": "ready", "replicas": {"warm": 1}, "waiting": 0, "episodes": 0,
        }  # fmt: skip
        await server.reset()
        answer = await server.http.get("/readyz")
        assert (answer.status_code, answer.json()["replicas"]) == (200, {"leased": 1})
        server.pool.drain()
        answer = await server.http.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert (await server.http.get("/healthz")).status_code == 200


async def test_not_ready_without_any_replica() -> None:
    async with serving() as server:
        server.provider.failures = [ReplicaError("no memory")] * 100
        server.provider.desktops[0].alive = False
        await until(lambda: server.pool.replicas[0].state == "failed")
        answer = await server.http.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "no_replica")


async def test_probes_need_no_token_and_metrics_do() -> None:
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}) as server:
        for path in ("/healthz", "/readyz", "/health"):
            assert (await server.http.get(path)).status_code == 200
        assert fault(await server.http.get("/metrics")) == (401, "client_error")
    async with serving(environment={"ENV_SERVER_TOKEN": "secret"}, open_metrics=True) as server:
        assert (await server.http.get("/metrics")).status_code == 200


async def test_opened_episodes_are_the_sum_of_ended_and_live_episodes() -> None:
    async with serving(2) as server:
        for task in (TASK, CRASHING):
            episode_id = await server.reset(task)
            await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
            await server.post("/evaluate", episode_id=episode_id)
            await server.post("/close", episode_id=episode_id)
        await server.reset()
        reported = await samples(server)
        ended = {
            key.split()[1]: value for key, value in reported.items() if key.startswith("env_server_episodes_ended_tot")
        }
        assert (ended["evaluated"], ended["grader_fault"], sum(ended.values())) == (1, 1, 2)
        assert (
            reported["env_server_episodes_opened_total"]
            == 3
            == sum(ended.values()) + reported["env_server_episodes_live"]
        )
        assert reported["env_server_steps_total"] == 2
        assert reported["env_server_step_seconds_count act"] == 2
        assert reported["env_server_step_seconds_count encode"] == 5
        assert reported["env_server_queue_seconds_count"] == reported["env_server_reset_seconds_count"] == 3
        assert reported["env_server_failed_answers_total grader_fault"] == 1


async def test_requests_are_counted_by_route_and_never_by_a_value_that_a_client_made_up() -> None:
    async with serving() as server:
        url = (await server.post("/v1/episodes", request_id="r", task_config=TASK)).json()["episode_id"]
        for path in (f"/v1/episodes/{url}", "/v1/episodes/made-up", "/made/up", "/osgym/made/up"):
            await server.http.get(path)
        await server.http.request("BREW", "/health")
        reported = await samples(server)
        assert reported["env_server_requests_total GET /v1/episodes/{episode_id} 200"] == 1
        assert reported["env_server_requests_total GET /v1/episodes/{episode_id} 404"] == 1
        assert reported["env_server_requests_total GET none 404"] == 2
        assert reported["env_server_sent_bytes_total"] > 0
        assert not any("made" in key or "BREW" in key for key in reported)


async def test_replicas_are_counted_by_state_with_their_starts_and_failures() -> None:
    async with serving(3) as server:
        await server.reset()
        server.provider.desktops[1].alive = False
        await until(lambda: server.pool.num_free == 2 and len(server.provider.desktops) == 4)
        reported = await samples(server)
        states = {state: reported[f"env_server_replicas {state}"] for state in ("warm", "leased", "failed")}
        assert states == {"warm": 2, "leased": 1, "failed": 0}
        assert (reported["env_server_replica_starts_total"], reported["env_server_replica_failures_total"]) == (4, 1)


async def test_two_applications_in_one_process_count_separately() -> None:
    async with serving() as first, serving() as second:
        await first.reset()
        assert (await samples(second))["env_server_episodes_opened_total"] == 0
