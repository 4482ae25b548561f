"""What a metrics endpoint serves."""

import json
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families


def samples_of(text: str) -> dict[str, float]:
    """Each sample by its name and its label values, in the order of the labels' names."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(target: str) -> dict[str, float]:
    answer = httpx.get(f"http://{target}/metrics", trust_env=False, timeout=10)
    assert answer.status_code == 200, answer.text
    return samples_of(answer.text)


def targets_in(folder: Path) -> dict[str, str]:
    """HOST:PORT of each process, by the program's name."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {one["labels"]["program"]: one["targets"][0] for (one,) in found}


def wait_for_target(folder: Path, program: str, *, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    while program not in (found := targets_in(folder)):
        assert time.monotonic() < deadline, f"no metrics of {program} within {limit_s:g} s"
        time.sleep(0.05)
    return found[program]
