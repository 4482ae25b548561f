"""The Grafana dashboard of env servers, against the metrics that a server exports."""

from dashboards import check_every_metric_is_shown, check_panels, check_questions, labels_in
from served_app import serving
from surface_server import CRASHING

NAME = "env-servers.json"


async def test_every_query_names_a_metric_and_labels_that_a_server_exports() -> None:
    async with serving() as server:
        episode_id = await server.reset(CRASHING)
        await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
        await server.post("/evaluate", episode_id=episode_id)
        text = (await server.http.get("/metrics")).text
    check_questions(NAME, labels_in(text))


async def test_every_metric_of_a_server_is_shown() -> None:
    async with serving() as server:
        check_every_metric_is_shown(NAME, (await server.http.get("/metrics")).text, prefix="env_server_")


def test_panels_do_not_overlap_and_have_unique_numbers_and_titles() -> None:
    check_panels(NAME)
