"""An export is complete or absent; what was in its place before is never lost by accident."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from osworld_pipeline.datasets.exporters.folder import MANIFEST, export_folder, folder_name, write_manifest
from osworld_pipeline.datasets.exporters.selection import Selection, export_views
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TableError


def write(target: Path, text: str, *, replace: bool = False) -> None:
    with export_folder(target, replace=replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "data").write_text(text)
        write_manifest(folder, "test", {"text": text})
        assert not (target / "sub").exists() or replace


def fail(target: Path, *, replace: bool = False) -> None:
    with export_folder(target, replace=replace) as folder:
        (folder / "data").write_text("x")
        raise RuntimeError("half way")


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_an_export_appears_whole_and_leaves_nothing_next_to_it(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "out", "one")
    assert content(tmp_path / "deep" / "out")["sub/data"] == "one"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        fail(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_and_kept(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(StoreError, match="exists: choose another folder, or add --replace"):
        write(tmp_path / "out", "two")
    assert content(tmp_path / "out")["sub/data"] == "one"


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "one")
    assert content(tmp_path / "out")["sub/data"] == "one"


def test_an_earlier_export_is_replaced_on_request(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    write(tmp_path / "out", "two", replace=True)
    assert content(tmp_path / "out")["sub/data"] == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_replacement_keeps_the_earlier_export(tmp_path: Path) -> None:
    write(tmp_path / "out", "one")
    with pytest.raises(RuntimeError, match="half way"):
        fail(tmp_path / "out", replace=True)
    assert content(tmp_path / "out")["sub/data"] == "one"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_only_an_export_is_ever_replaced(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    write(precious, "one")
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years")
    elif kind == "file":
        target.write_text("years")
    else:
        target.symlink_to(precious)
    with pytest.raises(StoreError, match=rf"not an export \(a link, or without {MANIFEST}\)"):
        write(target, "two", replace=True)
    assert content(precious)["sub/data"] == "one"
    assert target.exists()


@pytest.mark.slow
def test_the_next_export_removes_what_a_killed_export_left(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from osworld_pipeline.datasets.exporters.folder import export_folder\n"
        "with export_folder(Path(sys.argv[1]), replace=False) as folder:\n"
        "    (folder / 'data').write_text('x'); print('ready', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        write(tmp_path / "meanwhile", "alive")
        assert len([path for path in tmp_path.iterdir() if path.suffix == ".export"]) == 1
        os.kill(child.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out", "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meanwhile", "out"]


@pytest.mark.parametrize(
    ("text", "name"), [("os", "os"), ("../../etc", "_.._.._etc"), ("..", "_.."), ("", "_"), ("a b/c", "a_b_c")]
)
def test_no_id_leads_out_of_the_folder(text: str, name: str) -> None:
    assert folder_name(text) == name


def test_a_condition_with_several_statements_is_refused() -> None:
    for where in ("true); DROP TABLE union_tasks; SELECT (1", "1 = 1; SELECT 2"):
        with pytest.raises(TableError, match=r"--where (holds more than one statement|is not an SQL condition)"):
            Selection(where=where).over("evals", reward="reward")


def test_a_comment_at_the_end_of_a_condition_does_not_hide_the_rest_of_the_query() -> None:
    sql = Selection(where="x > 1 -- why", min_reward=0.5).over("(SELECT 2 AS x, 0.7 AS reward)", reward="reward")
    assert sql.splitlines()[-1] == ")"


def test_a_state_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"there is no state folder .*typo"), export_views(StateDir(tmp_path / "typo")):
        pass
    assert list(tmp_path.iterdir()) == []
