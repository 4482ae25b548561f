"""What the variables of a deployment change of the assets: the prefix of all keys, and the pool of evaluations."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from assets.keys import PREFIX_VARIABLE, prefix_from
from osworld_pipeline.errors import PipelineError

SHOW = """
import json
from osworld_pipeline.definitions import defs
graph = defs.resolve_asset_graph()
keys = graph.get_all_asset_keys()
print(json.dumps({
    "assets": sorted(key.to_user_string() for key in keys),
    "not made here": [key.to_user_string() for key in keys if not graph.get(key).is_materializable],
    "checks": sorted({check.asset_key.to_user_string() for check in graph.asset_check_keys}),
    "pools": {name: sorted({node.pool for node in defs.resolve_job_def(name).all_node_defs if node.pool})
              for name in ("evaluate", "evaluate_tasks", "collect_rollouts", "retrain")},
    "jobs": {name: len(defs.resolve_job_def(name).asset_layer.selected_asset_keys)
             for name in ("train", "evaluate", "rank", "retrain", "run_flywheel", "verify_replay")},
}))
"""


def shown(**environment: str) -> dict[str, Any]:
    """What Dagster loads with these variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OSWORLD")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=kept | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_with_a_prefix_the_assets_checks_and_jobs_are_the_same_under_other_keys() -> None:
    plain, prefixed = shown(), shown(OSWORLD_ASSET_PREFIX="team/agents")
    assert "champion" in plain["assets"]
    assert prefixed["assets"] == [f"team/agents/{name}" for name in plain["assets"]]
    assert prefixed["checks"] == [f"team/agents/{name}" for name in plain["checks"]]
    assert prefixed["jobs"] == plain["jobs"]
    assert prefixed["not made here"] == plain["not made here"] == [], "each dependency is an asset"


def test_evaluations_may_have_a_pool_of_their_own() -> None:
    names = ("evaluate", "evaluate_tasks", "collect_rollouts")
    assert shown()["pools"] == {name: ["trainer"] for name in (*names, "retrain")}
    assert shown(OSWORLD_EVALUATION_POOL="evaluation")["pools"] == {
        **{name: ["evaluation"] for name in names},
        "retrain": ["trainer"],
    }


@pytest.mark.parametrize(
    ("text", "parts"), [("", ()), ("/", ()), ("agents", ("agents",)), ("team/agents/", ("team", "agents"))]
)
def test_a_prefix_is_split_into_names_at_slashes(text: str, parts: tuple[str, ...]) -> None:
    assert prefix_from({PREFIX_VARIABLE: text}) == parts
    assert prefix_from({}) == ()


@pytest.mark.parametrize("text", ["a b", "team//agents", "team.agents", "a/*"])
def test_an_invalid_prefix_is_refused(text: str) -> None:
    with pytest.raises(PipelineError, match="is no prefix of asset keys"):
        prefix_from({PREFIX_VARIABLE: text})
