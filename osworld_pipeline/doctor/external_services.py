"""Findings from other programs: the env server about its desktops, Dagster about its instance, sglang about its
environment."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from osworld_pipeline.doctor.place import Place
from osworld_pipeline.doctor.programs import ask, ask_lines
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.shown_commands import ENV_SERVER, pipeline_line, shell_line
from osworld_pipeline.domain.state import DEFAULT_STATE
from osworld_pipeline.domain.top_level_names import python_module
from osworld_pipeline.errors import DependencyError

DESKTOP_CHECKS = (
    "local-packages",
    "local-desktop",
    "local-bounds",
    "local-extras",
    "qemu-packages",
    "qemu-image",
    "kvm",
    "desktop-env",
    "docker",
)
DESKTOPS_LIMIT_S = 30.0
"""Time limit of `env-server doctor`."""
INSTANCE_LIMIT_S = 25.0
SGLANG_LIMIT_S = 10.0
STALE_BEAT_S = 120.0
REPORT = "resources.instance_report"


def check_desktops(place: Place) -> Iterator[Finding]:
    """The findings of `env-server doctor`, as they arrive."""
    state = place.state.desktops
    command = [*python_module("env_server.main"), "doctor", "--json", "--state-dir", str(state)]
    command += ["--desktop-env-python", str(place.desktop_env_python)]
    num_lines = 0
    for line in ask_lines(command, limit_s=DESKTOPS_LIMIT_S):
        try:
            yield Finding.from_json(json.loads(line))
            num_lines += 1
        except (ValueError, KeyError, TypeError):
            continue
    if not num_lines:
        raise DependencyError(
            f"the env server does not start here: run `{shell_line(ENV_SERVER, 'doctor')}` to see why; its packages "
            "are those of the extra 'server'"
        )


def check_home(name: str, place: Place, *, folder: Path | None = None) -> Finding:
    """Whether Dagster and the commands that are run in `folder` (None: the working directory) use one instance."""
    folder = Path.cwd() if folder is None else folder
    home, own = place.dagster_home, _home_of_commands(place, folder)
    if not (folder / "dagster.yaml").is_file() and home is None:
        text = f"there is no dagster.yaml in {folder}, and DAGSTER_HOME is not set"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=how_to_set_up("project", folder))
    if home is None:
        if own == folder and _names_home(folder / ".env"):
            text = f"Dagster reads DAGSTER_HOME from {folder / '.env'}"
            return Finding(name=name, status=Status.OK, message=text)
        text = "DAGSTER_HOME is not set: Dagster's own programs would not keep the records of their runs"
        return Finding(name=name, status=Status.WARN, message=text, remedy=f"export DAGSTER_HOME={own}")
    if not home.is_absolute():
        text = f"DAGSTER_HOME is {home}, and Dagster requires an absolute path"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=f"export DAGSTER_HOME={home.resolve()}")
    if not (home / "dagster.yaml").is_file():
        text = f"there is no dagster.yaml in {home}: Dagster would run without pools, monitoring and limits"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=how_to_set_up("project", home))
    if (folder / "dagster.yaml").is_file() and own.resolve() != home.resolve():
        text = f"DAGSTER_HOME is {home}, and commands in {folder} use {own}: neither shows the runs of the other"
        return Finding(name=name, status=Status.WARN, message=text, remedy=f"export DAGSTER_HOME={own}, or cd {home}")
    return Finding(name=name, status=Status.OK, message=f"DAGSTER_HOME is {home}, with a dagster.yaml")


def _home_of_commands(place: Place, folder: Path) -> Path:
    """The folder that `cli/in_process/instance.py` uses."""
    return folder if place.state.root == (folder / DEFAULT_STATE).resolve() else place.state.root / "dagster"


def _names_home(variables: Path) -> bool:
    return variables.is_file() and "DAGSTER_HOME=" in variables.read_text(errors="replace")


def check_instance(place: Place) -> Iterator[Finding]:
    """`dagster-instance`: its file and its storage; `dagster-daemon`: the process for queues, schedules and sensors."""
    home = place.dagster_home or Path.cwd()
    lack = _lack_of_dagster(home)
    if lack:
        for name in ("dagster-instance", "dagster-daemon"):
            yield Finding(name=name, status=Status.MISSING, message=lack[0], remedy=lack[1])
        return
    said = ask([*python_module(REPORT), str(home)], limit_s=INSTANCE_LIMIT_S)
    if said.status:
        raise DependencyError(f"Dagster cannot report its instance: {said.stderr_tail}")
    answer = json.loads(said.stdout.splitlines()[-1])
    yield judge_instance("dagster-instance", answer, home)
    yield judge_daemon("dagster-daemon", answer, start=pipeline_line(place.state, "dev"))


def _lack_of_dagster(home: Path) -> tuple[str, str] | None:
    if importlib.util.find_spec("dagster") is None:
        return "Dagster is not installed", how_to_set_up("pipeline")
    if not (home / "dagster.yaml").is_file():
        return f"there is no dagster.yaml in {home}", how_to_set_up("project", home)
    return None


def judge_instance(name: str, answer: dict, home: Path) -> Finding:
    if "error" in answer:
        return Finding(
            name=name, status=Status.MISSING, message=answer["error"], remedy=_way_out(answer["error"], str(home))
        )
    if not answer["monitoring"].get("enabled") or not answer["monitoring"].get("free_slots_after_run_end_seconds"):
        return Finding(
            name=name,
            status=Status.WARN,
            message="run monitoring does not free pool slots: a killed run keeps its slot, and later runs never start",
            remedy=f"set in {home / 'dagster.yaml'}: "
            "run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 15}",
        )
    if answer["pools"].get("default_limit") is None:
        return Finding(
            name=name,
            status=Status.WARN,
            message="pools have no default limit: two trainers, or two writers of one table, may run at a time",
            remedy=f"set in {home / 'dagster.yaml'}: concurrency: {{pools: {{granularity: op, default_limit: 1}}}}",
        )
    if answer["relative"] and home.resolve() != Path.cwd():
        return Finding(
            name=name,
            status=Status.WARN,
            message=f"the paths of {home / 'dagster.yaml'} are relative, so from this folder they point elsewhere",
            remedy=f"cd {home}",
        )
    if answer.get("is_new"):
        return Finding(name=name, status=Status.OK, message="the instance is valid and empty")
    if answer["storage"] == "DagsterPostgresStorage" and answer["without_limit"]:
        # Dagster inserts the default limit of the pool. If the row exists, the insert fails, Postgres aborts the
        # transaction, and Dagster's update in the same transaction fails, too.
        pools = ", ".join(answer["without_limit"])
        return Finding(
            name=name,
            status=Status.WARN,
            message=f"pools without a limit of their own, whose runs fail in Postgres if the default changes: {pools}",
            remedy="; ".join(f"dagster instance concurrency set {pool} 1" for pool in answer["without_limit"]),
        )
    limits = "".join(f"{pool} {limit}, " for pool, limit in sorted(answer["limits"].items()))
    text = f"the instance opens ({answer['storage']}), {answer['num_unfinished']} runs unfinished, pools: {limits}"
    return Finding(name=name, status=Status.OK, message=f"{text}all others {answer['pools']['default_limit']}")


def judge_daemon(name: str, answer: dict, *, start: str) -> Finding:
    """`start`: the command that starts the daemon."""
    beats = answer.get("heartbeats_s") or {}
    if answer.get("failing_daemons"):
        text = f"Dagster's daemon process runs, but these of its daemons fail: {', '.join(answer['failing_daemons'])}"
        return Finding(name=name, status=Status.WARN, message=text, remedy=f"{start}, and read its output")
    if not beats or min(beats.values()) > STALE_BEAT_S:
        age = f"for {min(beats.values()) / 60:.0f} minutes" if beats else "yet"
        text = f"Dagster's daemon has sent no heartbeat {age}: no queue, schedule or sensor runs without it"
        return Finding(name=name, status=Status.WARN, message=text, remedy=start)
    text = f"Dagster's daemon sent a heartbeat {min(beats.values()):.0f} s ago"
    return Finding(name=name, status=Status.OK, message=text)


def _way_out(error: str, home: str) -> str:
    if "migrate" in error:
        return f"DAGSTER_HOME={home} dagster instance migrate"
    if "dagster_postgres" in error:
        return how_to_set_up("postgres")
    if "environment variable" in error:
        return "set the environment variable that the error names, for every process of Dagster"
    return f"correct {home}/dagster.yaml, or write it again: {how_to_set_up('project', home, '--overwrite')}"


def check_sglang(name: str, folder: Path) -> Finding:
    python, make = folder / "bin" / "python", how_to_set_up("sglang", "--folder", folder)
    if not python.exists():
        return Finding(
            name=name,
            status=Status.MISSING,
            message=f"there is no sglang environment at {folder}",
            remedy=f"{make} (CPU); with a GPU, install sglang in a separate environment and set SGLANG_ENV to it",
        )
    code = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
    said = ask([str(python), "-I", "-c", code], limit_s=SGLANG_LIMIT_S)
    if said.status:
        text = f"the environment {folder} has no sglang ({said.stderr_tail})"
        return Finding(name=name, status=Status.MISSING, message=text, remedy=make)
    sglang, torch = said.stdout.split()
    return Finding(name=name, status=Status.OK, message=f"sglang {sglang} with torch {torch} in {folder}")
