"""Checks the Grafana dashboards that `init --kubernetes` writes against the metrics that a process exports."""

import json
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from osworld_pipeline.project import kubernetes_files

FOLDER = "kubernetes/components/grafana"
OF_PROMETHEUS = {"job", "instance", "le"}


def dashboard(name: str) -> dict[str, Any]:
    (text,) = [file.text for file in kubernetes_files() if file.name == f"{FOLDER}/{name}"]
    return json.loads(text)


def questions(name: str) -> list[str]:
    return [target["expr"] for panel in dashboard(name)["panels"] for target in panel["targets"]]


def labels_in(text: str) -> dict[str, set[str]]:
    """The labels of each sample, by its name."""
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def check_questions(name: str, exported: dict[str, set[str]]) -> None:
    """Every query names a metric and labels that are exported."""
    for question in questions(name):
        names = re.findall(r"\b(?:env_server|osworld|process)_\w+(?=\{)", question)
        assert names, question
        for metric in names:
            assert metric in exported, question
            used = set(re.findall(r"(\w+)(?=!?=~?\")", question))
            used |= {word for words in re.findall(r" by \(([^)]*)\)", question) for word in words.split(", ")}
            assert used <= exported[metric] | OF_PROMETHEUS, question


def check_every_metric_is_shown(name: str, text: str, *, prefix: str) -> None:
    families = {
        family.name
        for family in text_string_to_metric_families(text)
        if family.name.startswith(prefix) and not family.name.endswith("_created")
    }
    asked = " ".join(questions(name))
    assert not {family for family in families if family not in asked}


def check_panels(name: str) -> None:
    """Panels do not overlap, and each has its own number and title."""
    panels = dashboard(name)["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
