"""Task splits: the reference's columns and JSON forms, stable by id, and nothing odd in a tree is fatal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from osworld_pipeline.datasets.task_split import is_test_task, split_tasks, write_split
from osworld_pipeline.errors import DatasetError


def put(root: Path, domain: str, name: str, **changes: Any) -> Path:
    config = {"id": name, "instruction": f"Do {name}.", "evaluator": {"func": "exact_match"}, "_note": "x"} | changes
    path = root / "evaluation_examples" / "examples" / domain / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for domain in ("chrome", "os"):
        for number in range(40):
            put(tmp_path / "osworld", domain, f"{domain}-{number}")
    return tmp_path / "osworld"


def ids(tasks: Any) -> set[str]:
    return {task.task_id for task in tasks}


def test_a_new_file_moves_no_other_task(tree: Path) -> None:
    before = split_tasks(tree)
    put(tree, "chrome", "newcomer")
    after = split_tasks(tree)
    assert ids(after.train) - {"newcomer"} == ids(before.train)
    assert ids(after.test) - {"newcomer"} == ids(before.test)


def test_a_domain_alone_is_split_as_it_is_among_others(tree: Path) -> None:
    everything, alone = split_tasks(tree), split_tasks(tree, domains=["os"])
    assert ids(alone.test) == {task_id for task_id in ids(everything.test) if task_id.startswith("os-")}
    assert alone.domains == ("os",)


def test_the_share_is_near_the_ratio_and_follows_the_seed() -> None:
    names = [f"task-{number}" for number in range(4000)]
    chosen = {seed: {name for name in names if is_test_task(name, test_ratio=0.2, seed=seed)} for seed in (42, 43)}
    assert all(740 <= len(found) <= 860 for found in chosen.values())
    assert chosen[42] != chosen[43]


@pytest.mark.parametrize(("ratio", "num_test"), [(0.0, 0), (1.0, 80)])
def test_a_ratio_at_its_bounds_takes_none_or_all(tree: Path, ratio: float, num_test: int) -> None:
    assert len(split_tasks(tree, test_ratio=ratio).test) == num_test


def test_a_larger_ratio_only_adds_to_the_test_half(tree: Path) -> None:
    assert ids(split_tasks(tree, test_ratio=0.2).test) < ids(split_tasks(tree, test_ratio=0.6).test)


def test_the_files_have_the_reference_columns_and_forms(tree: Path, tmp_path: Path) -> None:
    split = split_tasks(tree, domains=["chrome"])
    write_split(split, tmp_path / "out")
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    assert list(row) == ["prompt", "images", "task_id", "domain", "instruction", "task_config"]
    assert (json.loads(row["prompt"]), row["images"], row["domain"]) == (row["task_id"], "[]", "chrome")
    config = json.loads(row["task_config"])
    assert (config["id"], config["domain"], "_note" in config) == (row["task_id"], "chrome", False)
    index = json.loads((tmp_path / "out" / "task_index.json").read_text())
    assert list(index) == ["train", "test", "domains", "total_tasks"]
    assert (set(index["test"]), index["domains"], index["total_tasks"]) == (ids(split.test), ["chrome"], 40)


def test_what_cannot_be_used_is_listed_with_its_file_and_reason(tree: Path, tmp_path: Path) -> None:
    put(tree, "os", "string-evaluator", evaluator="exact_match")
    put(tree, "os", "no-words", instruction=["a", "list"])
    put(tree, "Windows/ppt", "os-1", instruction="The same id again.")
    examples = tree / "evaluation_examples" / "examples"
    (examples / "os" / "cut.json").write_text('{"id": "cut')
    (examples / "os" / "a.json.nosetup").write_text("{}")
    (examples / "template.json").write_text('{"id": 7}')
    split = split_tasks(tree)
    assert len(split.train) + len(split.test) == 81
    assert {task.domain for task in (*split.train, *split.test) if task.task_id == "os-1"} == {"os", "Windows/ppt"}
    reasons = {reject.path: reject.reason for reject in split.rejects}
    assert set(reasons) == {
        "os/string-evaluator.json", "os/no-words.json", "os/cut.json", "template.json",
    }  # fmt: skip
    write_split(split, tmp_path / "out")
    rejects = pq.read_table(tmp_path / "out" / "rejects.parquet").to_pylist()
    assert {row["source_path"] for row in rejects} == set(reasons)


def test_a_folder_of_domains_selects_all_of_them(tree: Path) -> None:
    put(tree, "Windows/ppt", "slides")
    put(tree, "Windows/word", "letter")
    split = split_tasks(tree, domains=["Windows"])
    assert split.domains == ("Windows/ppt", "Windows/word")
    assert {task.domain for task in (*split.train, *split.test)} == set(split.domains)


def test_the_error_for_an_unknown_domain_names_the_existing_ones(tree: Path) -> None:
    with pytest.raises(DatasetError, match=r"no domain 'chrom' in .*; there are: chrome, os"):
        split_tasks(tree, domains=["chrom"])


def test_a_folder_that_is_not_a_checkout_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="give the folder of an OSWorld checkout"):
        split_tasks(tmp_path)


def test_a_split_cut_short_leaves_no_index(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import osworld_pipeline.datasets.task_split as module

    write_split(split_tasks(tree), tmp_path / "out")
    monkeypatch.setattr(module, "TEST_FILE", "no-folder\0/test.parquet")
    with pytest.raises(ValueError, match="null"):
        write_split(split_tasks(tree), tmp_path / "out")
    assert not (tmp_path / "out" / "task_index.json").exists()


def test_of_two_files_with_one_id_the_one_named_by_it_stays(tree: Path) -> None:
    put(tree, "os", "os-1-copy", id="os-1", instruction="A copy.")
    (reject,) = split_tasks(tree).rejects
    assert (reject.path, reject.task_id) == ("os/os-1-copy.json", "os-1")


def test_the_real_tree_is_split_with_every_reject_explained(real_data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "tasks", "--osworld-path", str(real_data / "osworld")]
    result = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "out")], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    split = split_tasks(real_data / "osworld")
    num_files = len(list((real_data / "osworld").glob("evaluation_examples/examples/**/*.json")))
    assert len(split.train) + len(split.test) + len(split.rejects) == num_files
    assert all(reject.reason for reject in split.rejects)
    assert f"{len(split.train)} train and {len(split.test)} test tasks" in result.stdout
    assert len(split.train) > 300
    # Every task of this tree's Windows folder is also in a folder next to it, under the same id.
    assert len(split_tasks(real_data / "osworld", domains=["Windows"]).train) > 20


def test_the_rows_are_those_of_the_reference_script(real_data: Path, tmp_path: Path) -> None:
    peers = os.environ.get("OSWORLD_PEERS")
    if not peers:
        pytest.skip("OSWORLD_PEERS names no folder with slime/")
    script = Path(peers) / "slime" / "tools" / "prepare_tasks.py"
    arguments = ["--osworld-path", str(real_data / "osworld"), "--output-dir", str(tmp_path / "theirs")]
    subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True, timeout=120)
    split = split_tasks(real_data / "osworld", domains=["chrome", "os"])
    write_split(split, tmp_path / "ours")
    rows = [
        {
            row["task_id"]: row
            for half in ("train", "test")
            for row in pq.read_table(tmp_path / who / f"{half}.parquet").to_pylist()
        }
        for who in ("ours", "theirs")
    ]
    ours, theirs = rows
    assert set(theirs) - set(ours) == {Path(reject.path).stem for reject in split.rejects}
    assert all(theirs[task_id] == row for task_id, row in ours.items())
    index = json.loads((tmp_path / "theirs" / "task_index.json").read_text())
    assert list(index) == list(json.loads((tmp_path / "ours" / "task_index.json").read_text()))
