"""A user's folder may have packages with the same names as ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from osworld_pipeline.domain.top_level_names import PACKAGES, ROOT, shadow_sentence, shadowing
from osworld_pipeline.project import project_files, write_project

LOADS = "import assets.checkpoints, resources.state, jobs.pipeline; print(assets.__file__)"


def put_packages(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the user is imported')\n")


def python(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER", "OSWORLD"))}
    path = f"{ROOT}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**environment, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_only_importable_files_shadow_our_packages(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "logo.png").touch()
    assert shadow_sentence(tmp_path) == ""
    put_packages(tmp_path, "jobs")
    (tmp_path / "resources.py").touch()
    assert shadowing(tmp_path) == [tmp_path / "resources.py", tmp_path / "jobs" / "__init__.py"]
    assert shadow_sentence(tmp_path).startswith(f"resources.py and jobs/__init__.py in {tmp_path} shadow ")


def test_our_own_folder_shadows_nothing() -> None:
    assert shadow_sentence(ROOT) == ""
    assert all((ROOT / name / "__init__.py").is_file() for name in PACKAGES)


def test_a_command_reports_shadowing_with_one_sentence_and_uses_its_own_packages(tmp_path: Path) -> None:
    put_packages(tmp_path, "assets", "resources", "jobs")
    done = python("-m", "osworld_pipeline.cli", "train", "--recipe", "smoke", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert f"in {tmp_path} shadow what osworld-pipeline installs" in done.stderr
    quiet = python("-m", "osworld_pipeline.cli", "recipes", "--json", cwd=tmp_path)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_programs_of_a_command_use_our_packages(tmp_path: Path) -> None:
    """`doctor` runs `-m resources.instance_report` and `-m env_server.main`."""
    put_packages(tmp_path, "resources", "env_server")
    write_project(tmp_path, project_files())
    done = python("-m", "osworld_pipeline.cli", "doctor", "--role", "dagster", cwd=tmp_path)
    assert "the instance is valid and empty" in done.stdout, done.stdout + done.stderr
    assert re.search(r"warn +top-level-names", done.stdout)


def test_a_package_of_the_same_name_that_is_imported_already_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "assets.py").touch()
    use = "from osworld_pipeline.domain.top_level_names import use_own_packages as u; u()"
    done = python("-c", f"import assets; {use}", cwd=tmp_path)
    assert "DependencyError" in done.stderr
    assert f"{tmp_path}/assets.py is imported as assets" in done.stderr
    assert python("-c", f"{use}; {LOADS}", cwd=tmp_path).stdout.strip() == str(ROOT / "assets" / "__init__.py")


@pytest.mark.slow
def test_dagster_loads_the_workspace_of_init_in_a_folder_with_the_same_names(tmp_path: Path) -> None:
    """The process has the variables of .env and puts the working directory first, as Dagster's code servers do."""
    put_packages(tmp_path, "assets", "resources", "jobs")
    write_project(tmp_path, project_files())
    listed = python("-m", "dagster", "job", "list", "-w", "workspace.yaml", cwd=tmp_path, DAGSTER_HOME=str(tmp_path))
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "Job: train" in listed.stdout
    validated = python("-m", "dagster", "definitions", "validate", "-w", "workspace.yaml", cwd=tmp_path)
    assert validated.returncode == 0, validated.stdout + validated.stderr
