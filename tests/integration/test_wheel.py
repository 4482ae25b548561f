"""What the wheel holds, and what a user gets from the wheel alone: in an empty folder, without a checkout on the search
path. The dependencies are those of this interpreter (`Installed.with_present_packages`); `make test-install` installs
all of them anew."""

import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed_wheel import ROOT, UV, Installed, build, run, succeed

PACKAGES = ("osworld_pipeline", "assets", "resources", "jobs", "env_server")
NEEDED = (
    "osworld_pipeline/py.typed",
    "osworld_pipeline/recipes/demo.toml",
    "osworld_pipeline/wire/desktops_page/desktops.js",
    "osworld_pipeline/project/dagster.yaml",
    "osworld_pipeline/project/dagster.postgres.yaml",
    "osworld_pipeline/project/workspace.yaml",
    "osworld_pipeline/project/env",
    "osworld_pipeline/installing/debian.sh",
    "osworld_pipeline/installing/debian-packages-debian.txt",
    "osworld_pipeline/installing/sglang/requirements.txt",
    "osworld_pipeline/installing/desktop-env/requirements.txt",
    "osworld_pipeline/installing/tools.txt",
    "osworld_pipeline/policy_servers/sglang_cpu/serve.py",
    "osworld_pipeline/policy_servers/sglang_cpu/stubs/sgl_kernel/__init__.py",
    "env_server/py.typed",
    "env_server/example.toml",
    "env_server/api/docs_page/page.html",
    "env_server/api/status_page/page.js",
    "env_server/guest/agent.py",
    "env_server/guest/assets/bin/sudo",
    "env_server/guest/assets/openbox.xml",
    "env_server/providers/qemu/windows_tools/start.cmd",
    "env_server/providers/desktop_env/stubs/easyocr.py",
)
KINDS = {".py", ".toml", ".yaml", ".txt", ".sh", ".jinja", ".html", ".css", ".js", ".svg", ".md", ".typed", ".xml",
         ".ps1", ".cmd", ".env", ".json", ""}  # fmt: skip
"""Suffixes of files that belong into the wheel: no pictures, no notebooks, no compiled files."""
NOT_SHIPPED = re.compile(
    r"\bscripts/|repository'?s? root|\bdocs/[\w/-]+\.md|\bdeploy/|\.venv\b|\bmake \w", re.IGNORECASE
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed.with_present_packages(built[0], tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture
def project(installed: Installed, tmp_path: Path) -> Path:
    """A project folder made by `init`."""
    assert installed.command("init", cwd=tmp_path).returncode == 0
    return tmp_path


def files_of_wheel(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


def files_of_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def test_wheel_has_all_files_of_the_packages_and_no_others(built: tuple[Path, Path]) -> None:
    packed = {name for name in files_of_wheel(built[0]) if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in packed} == set(PACKAGES)
    assert {Path(name).suffix for name in packed} == KINDS
    assert set(NEEDED) <= packed
    tracked = subprocess.run(
        ["git", "ls-files", "--", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode == 0:
        assert packed == set(tracked.stdout.split())


def test_sdist_has_what_builds_the_wheel_and_no_more(built: tuple[Path, Path]) -> None:
    packed = files_of_sdist(built[1])
    others = {name for name in packed if name.partition("/")[0] not in PACKAGES}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "pyproject.toml.orig"}
    assert packed - others == {name for name in files_of_wheel(built[0]) if ".dist-info/" not in name}


def contents_of(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without the version of the program that built it and the digests of all files."""
    with zipfile.ZipFile(wheel) as archive:
        names = (name for name in archive.namelist() if not name.endswith((".dist-info/WHEEL", ".dist-info/RECORD")))
        return {name: archive.read(name) for name in names}


def test_the_sdist_builds_the_wheel_that_the_checkout_builds(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheels: list[Path] = []
    for source in (built[1], ROOT):
        folder = tmp_path / str(len(wheels))
        succeed(UV, "build", "--quiet", "--offline", "--wheel", "--out-dir", folder, source, cwd=tmp_path)
        wheels += folder.glob("*.whl")
    from_sdist, from_checkout = map(contents_of, wheels)
    assert from_sdist == from_checkout == contents_of(built[0])


def test_programs_of_the_guest_can_be_executed(installed: Installed) -> None:
    (site,) = installed.root.glob("lib/python*/site-packages")
    programs = list((site / "env_server" / "guest" / "assets" / "bin").iterdir())
    assert len(programs) > 2
    assert all(path.stat().st_mode & 0o111 for path in programs)


def test_no_checkout_is_on_the_search_path(installed: Installed, tmp_path: Path) -> None:
    code = "import assets, env_server, jobs, osworld_pipeline as o, resources as r; print(o.__file__, r.__file__)"
    assert str(ROOT) not in succeed(installed.python, "-c", code, cwd=tmp_path).replace(str(installed.root), "")


def test_without_a_command_it_prints_what_is_here_and_what_to_do_next(installed: Installed, tmp_path: Path) -> None:
    done = installed.command(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no project" in done.stdout
    assert f"{installed.root}/bin/osworld-pipeline init" in done.stdout
    assert len(done.stdout.splitlines()) < 24
    assert NOT_SHIPPED.findall(done.stdout) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_needs_a_project_names_init(installed: Installed, tmp_path: Path) -> None:
    done = installed.command("demo", "--recipe", "smoke", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no dagster.yaml in" in done.stderr
    assert "osworld-pipeline init`" in done.stderr


def test_recipes_are_listed(installed: Installed, tmp_path: Path) -> None:
    listed = json.loads(installed.command("recipes", "--json", cwd=tmp_path).stdout)
    assert {"demo", "smoke", "qwen3vl_4b"} <= set(listed)


def test_setup_prints_the_list_for_an_administrator(installed: Installed, tmp_path: Path) -> None:
    done = installed.command("setup", "--dry-run", "debian", "extras", "qemu", "wine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" or done.stdout.startswith("apt-get update && apt-get install -y --no-install-recommends ")


def test_doctor_in_a_project_names_nothing_that_a_wheel_does_not_ship(installed: Installed, project: Path) -> None:
    answer = json.loads(installed.command("doctor", "--json", cwd=project).stdout)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert (found["dagster-home"]["status"], found["dagster-instance"]["status"]) == ("ok", "ok")
    advised = [f"{finding['message']} {finding['remedy']}" for finding in found.values()]
    assert [text for text in advised if NOT_SHIPPED.search(text.replace(str(installed.root), ""))] == []
    assert "setup sglang --folder" in found["sglang"]["remedy"]
    assert "setup desktop-env" in found["desktop-env"]["remedy"]
    assert not (project / "var").exists(), "looking makes nothing"


def test_a_plan_can_be_made_with_the_editable_recipe_of_the_project(installed: Installed, project: Path) -> None:
    done = installed.command("train", "--recipe", "recipe.toml", "--dry-run", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipe recipe" in done.stdout


@pytest.mark.slow
@pytest.mark.desktop
@pytest.mark.timeout(900)
def test_every_stage_of_the_smoke_recipe_runs(installed: Installed, tmp_path: Path) -> None:
    assert installed.command("init", "--recipe", "smoke", cwd=tmp_path).returncode == 0
    done = installed.command("demo", "--recipe", "recipe.toml", "--json", cwd=tmp_path, limit_s=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [sum(score["outcomes"].values()) for score in json.loads(done.stdout)["scores"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("own", [(), ("assets", "resources", "jobs")], ids=["alone", "with packages of these names"])
def test_dagster_loads_the_workspace(installed: Installed, project: Path, own: tuple[str, ...]) -> None:
    for name in own:
        (project / name).mkdir()
        (project / name / "__init__.py").write_text("raise SystemExit('the package of the user is imported')\n")
    reported = run(installed.python, "-m", "dagster", "job", "list", "-w", "workspace.yaml", cwd=project)
    assert reported.returncode == 0, reported.stdout + reported.stderr
    assert "Job: train" in reported.stdout
    sentence = installed.command(cwd=project).stderr
    assert ("shadow what osworld-pipeline installs" in sentence) == bool(own)


def test_a_missing_extra_ends_with_one_clear_error(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The packages in `missing` cannot be imported, as after an installation without extras."""
    installed = Installed.with_present_packages(built[0], tmp_path / "venv")
    (site,) = installed.root.glob("lib/python*/site-packages")
    missing = ("dagster", "torch", "duckdb", "pyarrow", "numpy", "starlette", "fastapi")
    # Not sitecustomize.py: Debian's own Python has one that hides ours.
    (site / "missing.pth").write_text(f"import sys; sys.modules.update(dict.fromkeys({missing}))\n")
    done = installed.command("demo", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert "is not installed here; run `" in done.stderr
    assert "osworld-pipeline[" in done.stderr
    assert installed.command("init", cwd=tmp_path).returncode == 0, "a project folder needs no extra"
    examined = installed.command("doctor", "--role", "dagster", "--json", cwd=tmp_path)
    assert (examined.returncode, examined.stderr) == (1, ""), "the doctor needs no extra"
