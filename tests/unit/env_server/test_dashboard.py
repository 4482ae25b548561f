"""The Grafana dashboard that `init --kubernetes` writes, against the metrics that a server exports."""

import json
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from served_app import Server, serving
from surface_server import CRASHING

from osworld_pipeline.project import kubernetes_files

NAME = "kubernetes/components/grafana/env-servers.json"
OF_PROMETHEUS = {"job", "instance", "le"}


def dashboard() -> dict[str, Any]:
    (text,) = [file.text for file in kubernetes_files() if file.name == NAME]
    return json.loads(text)


def questions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


async def exported(server: Server) -> dict[str, set[str]]:
    """The labels of each sample, by its name."""
    families = text_string_to_metric_families((await server.http.get("/metrics")).text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


async def test_every_question_names_a_metric_and_labels_that_a_server_exports() -> None:
    async with serving() as server:
        episode_id = await server.reset(CRASHING)
        await server.post("/step", episode_id=episode_id, action="WAIT", pause=0)
        await server.post("/evaluate", episode_id=episode_id)
        labels = await exported(server)
    for question in questions():
        names = re.findall(r"env_server_\w+", question)
        assert names, question
        for name in names:
            assert name in labels, question
            used = set(re.findall(r"(\w+)(?=!?=~?\")", question))
            used |= {word for words in re.findall(r" by \(([^)]*)\)", question) for word in words.split(", ")}
            assert used <= labels[name] | OF_PROMETHEUS, question


async def test_every_metric_of_a_server_is_shown() -> None:
    async with serving() as server:
        text = (await server.http.get("/metrics")).text
    families = {family.name for family in text_string_to_metric_families(text) if not family.name.endswith("_created")}
    asked = " ".join(questions())
    assert not {name for name in families if name not in asked}


def test_panels_lie_side_by_side_and_have_numbers_and_titles_of_their_own() -> None:
    panels = dashboard()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
