"""Our artefacts compared value by value with those of Slime-OSWorld's own script, run from its checkout by path.

The checkout is not part of this repository: OSWORLD_PEERS names a folder that holds slime/.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import turn_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_samples import config, image_text, put_lines, put_table, put_task, turn

from benchmarks.union import assert_equal_artefacts, reference_prompt, run_reference
from benchmarks.union_input import generate_input
from osworld_pipeline.datasets.artefacts import write_union_artefacts
from osworld_pipeline.datasets.sources import REPLAY_SOURCES
from osworld_pipeline.datasets.union.forms import is_action
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("OSWORLD_PEERS" not in os.environ, reason="OSWORLD_PEERS names no folder with checkouts"),
]


@pytest.fixture(scope="module")
def checkout() -> Path:
    path = Path(os.environ["OSWORLD_PEERS"]) / "slime"
    if not path.is_dir():
        pytest.skip(f"no checkout at {path}")
    return path


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=30)
ACTION = st.sampled_from([*turn_corpus.ACTIONS, *turn_corpus.UNKNOWN])
IDS = st.sampled_from(["a", "b", "c", "a_chunk0", "a_chunk12", "b_chunk1", "d-é"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def records(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """Records, well-formed by Slime-OSWorld's rules: every image has its placeholder, contents are strings or lists."""
    messages: list[dict[str, Any]] = []
    images = []
    for _ in range(draw(st.integers(1, 3))):
        has_image = draw(st.booleans())
        images += [image_text(draw(st.integers(0, 3)))] * has_image
        for role, text in (("user", draw(TEXT)), ("assistant", turn(draw(ACTION)))):
            is_list = draw(st.booleans())
            with_image = has_image and role == "user"
            text = text.replace("<image>", "")
            content: Any = ("<image>\n" if with_image else "") + text
            if is_list:
                content = [{"type": "image"}] * with_image + [{"type": "text", "text": text}]
            messages.append({"role": role, "content": content} | draw(st.sampled_from([{}, {}, {"extra": draw(JSON)}])))
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(TEXT)})
    task_id = draw(IDS)
    place = draw(st.sampled_from([{"task_id": task_id}, {"id": task_id}, {"metadata": {"id": task_id}}]))
    return {**place, draw(st.sampled_from(["messages", "conversations"])): messages, "images": images}


@settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_generated_input_gives_equal_artefacts(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    state = StateDir(tmp_path_factory.mktemp("union"))
    pool = data.draw(st.lists(records(), min_size=1, max_size=30))
    for source in REPLAY_SOURCES:
        put_lines(state, source.name, data.draw(st.lists(st.sampled_from(pool), max_size=15)))
    put_lines(state, "exploratory_rollouts", [{"task_id": task_id} for task_id in data.draw(st.lists(IDS))])
    domains = st.sampled_from([{}, {"domain": "chrome"}, {"snapshot": "Excel"}, {"config": [{"path": "C:\\x"}]}])
    for name in ("distill_train", "distill_test"):
        rows = []
        for task_id in data.draw(st.lists(IDS, min_size=1, max_size=3)):
            text = json.dumps({**config(task_id), **data.draw(domains), "x": data.draw(JSON)})
            rows.append({"task_id": task_id, "task_config": text})
        put_table(state, name, rows)
    for task_id in data.draw(st.lists(IDS, unique_by=lambda task_id: task_id.split("_chunk")[0])):
        put_task(state, {**config(task_id), **data.draw(domains), "x": data.draw(JSON)})
    _compare(checkout, state.datasets, state.osworld_repo, state.root)


@pytest.mark.parametrize("kind", ["text", "images"])
def test_the_benchmark_s_input_gives_equal_artefacts(checkout: Path, tmp_path: Path, kind: Any) -> None:
    made = generate_input(tmp_path, kind=kind, num_bytes=12_000_000)
    _compare(checkout, made.hf_root, made.osworld_repo, tmp_path)


def _compare(checkout: Path, hf_root: Path, osworld_repo: Path, root: Path) -> None:
    osworld_repo.mkdir(exist_ok=True)
    run_reference(checkout, hf_root, osworld_repo, root / "theirs")
    write_union_artefacts(hf_root, osworld_repo, root / "ours", system_prompt=reference_prompt(checkout))
    assert_equal_artefacts(root / "ours", root / "theirs")


_JUDGE = """
import importlib.util, json, sys, types
for name in ("slime", "slime.utils", "slime.utils.types"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["slime.utils.types"].Sample = object
spec = importlib.util.spec_from_file_location("slime_env", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["slime_env"] = module
spec.loader.exec_module(module)
env = module.OSWorldEnvWrapper(module.OSWorldEnvConfig(), task_config={})
def judge(text):
    try:
        found = env._parse_action(text)
    except Exception:  # a crash of theirs is no verdict; on a clean turn None fails the comparison
        return None
    return found["action_type"] != "unknown" or found["fallback_used"]
json.dump([judge(text) for text in json.load(sys.stdin)], sys.stdout)
"""


def test_turns_are_kept_and_dropped_as_the_reference_does(checkout: Path) -> None:
    clean = [*turn_corpus.well_formed(), *turn_corpus.lenient(), *turn_corpus.no_action()]
    damaged = list(turn_corpus.damaged())
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE, str(checkout / "slime_osworld" / "env.py")],
        input=json.dumps(clean + damaged), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    theirs = json.loads(done.stdout)
    dialect = load_dialect("slime")
    assert [is_action(dialect, text) for text in clean] == theirs[: len(clean)]
    # Damaged turns: a turn that only ours drops names an action, key or status that does not exist.
    kept = [text for text, is_kept in zip(damaged, theirs[len(clean) :], strict=True) if is_kept]
    dropped = [text for text in kept if not is_action(dialect, text)]
    assert len(dropped) <= 0.02 * len(damaged)
    assert all(re.search(r'"(?:action|keys|status)"', text) for text in dropped)
