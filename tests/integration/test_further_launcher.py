"""The launcher that docs/launchers.md writes, installed as a distribution of its own: submitit runs its jobs here."""

from pathlib import Path

import pytest
from launches import cancel, finish, marked, new_mark, start_launch, wait_until
from page_blocks import ROOT, check_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ON = {"slurm": {"cluster": "local", "gpus": 0}}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's module and its entry point, as an installer leaves them."""
    folder = tmp_path_factory.mktemp("site")
    blocks = list(check_links.Page(ROOT / "docs" / "launchers.md").blocks)
    (module,) = (block.text for block in blocks if block.text.startswith("# osworld_slurm.py"))
    (points,) = (
        block.text for block in blocks if "osworld_pipeline.launchers" in block.text and block.language == "toml"
    )
    (folder / "osworld_slurm.py").write_text(module)
    info = folder / "osworld_slurm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: osworld-slurm\nVersion: 1.0\n")
    header, line = points.strip().splitlines()
    name, _, target = line.partition(" = ")
    assert header == '[project.entry-points."osworld_pipeline.launchers"]'
    (info / "entry_points.txt").write_text(f"[osworld_pipeline.launchers]\n{name} = {target.strip(chr(34))}\n")
    return folder


def test_a_program_runs_as_a_job_of_the_queue_and_reports(installed: Path, tmp_path: Path) -> None:
    job = {"act": "sum", "numbers": [1, 2], "secret": "hush-hush", "mark": new_mark()}
    messages = finish(start_launch(tmp_path, ON, "launched.program", job, installed=[installed]))
    assert [message.get("done") for message in messages[:-1]] == [1, 2]
    assert messages[-1] == {"kind": "returned", "result": {"sum": 3, "secret": "hush-hush"}}
    written = [path.read_bytes() for path in (tmp_path / "logs" / "slurm").rglob("*") if path.is_file()]
    assert written
    assert not any(b"hush-hush" in data for data in written), "the queue's files hold no secret"
    assert list((tmp_path / "launches").iterdir()) == []


def test_a_failure_of_the_program_is_reported_unchanged(installed: Path, tmp_path: Path) -> None:
    launch = start_launch(tmp_path, ON, "launched.program", {"act": "fault", "mark": new_mark()}, installed=[installed])
    assert finish(launch)[-1] == {"kind": "failed", "message": "the server is gone", "allow_retries": True}


def test_a_cancelled_step_lets_the_job_clean_up_and_ends_it(installed: Path, tmp_path: Path) -> None:
    mark = new_mark()
    job = {"act": "wait", "mark": mark, "clean_up": str(tmp_path / "clean")}
    launch = start_launch(tmp_path, ON, "launched.program", job, installed=[installed])
    wait_until(lambda: marked(mark), "the job runs")
    outcome = cancel(launch)
    assert outcome == {"kind": "failed", "message": "launched.program was cancelled", "allow_retries": False}
    assert marked(mark) == []
    assert (tmp_path / "clean-0").read_text() == "clean"


def test_several_ranks_are_refused_before_anything_is_submitted(installed: Path, tmp_path: Path) -> None:
    launch = start_launch(tmp_path, ON, "launched.program", {"act": "sum"}, num_processes=2, installed=[installed])
    outcome = finish(launch)[-1]
    assert outcome["message"].startswith("trainer.num_processes is 2, and this launcher runs one rank")
    assert outcome["allow_retries"] is False
    assert not (tmp_path / "launches").exists()
