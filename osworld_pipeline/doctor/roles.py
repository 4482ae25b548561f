"""The roles of a machine, and the checks for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from osworld_pipeline.doctor.checkup import Check, one
from osworld_pipeline.doctor.external_services import (
    DESKTOP_CHECKS,
    DESKTOPS_LIMIT_S,
    INSTANCE_LIMIT_S,
    SGLANG_LIMIT_S,
    check_desktops,
    check_home,
    check_instance,
    check_sglang,
)
from osworld_pipeline.doctor.machine import (
    TORCH_LIMIT_S,
    check_disk,
    check_file_system,
    check_gpu,
    check_memory,
    check_names,
    check_open_files,
    check_torch,
)
from osworld_pipeline.doctor.packages import check_extra, check_python
from osworld_pipeline.doctor.place import Place
from osworld_pipeline.doctor.ports import check_port
from osworld_pipeline.doctor.stores import (
    CATALOG_LIMIT_S,
    check_adapters,
    check_catalog,
    check_locks,
    check_mlflow_database,
)
from osworld_pipeline.domain.remedies import EXTRAS
from osworld_pipeline.domain.shown_commands import ENV_SERVER, PIPELINE, mlflow_line, pipeline_line, shell_line
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes.schema import Recipe

SPARE_S = 2.0
"""Time of a check beyond the limit of the program that it runs."""
PROC = Path("/proc")


@dataclass(frozen=True)
class Role:
    meaning: str
    checks: tuple[str, ...]
    """A check whose finding is missing or broken prevents the role; a warning does not."""
    start: Callable[[StateDir, str], str]
    """The command that a ready machine runs next, for a state and a recipe's name."""


_HOST = ("python", "memory", "open-files")
_LOCAL = ("local-packages", "local-desktop", "local-bounds", "local-extras")
_STATE = ("disk", "file-system", "catalog", "mlflow-database", "adapters", "locks")
_DAGSTER = ("dagster-home", "dagster-instance", "dagster-daemon")

ROLES: Mapping[str, Role] = {
    "demo": Role(
        "the whole pipeline on this machine",
        (
            *(*_HOST, "top-level-names", "packages-server", "packages-pipeline", "packages-train", *_LOCAL, *_STATE),
            *("gpu", "dagster-instance"),
        ),
        lambda state, _: pipeline_line(state, "demo"),
    ),
    "local": Role(
        "an env server with local desktops",
        (*_HOST, "packages-server", *_LOCAL, "disk", "port-8100"),
        lambda *_: shell_line(ENV_SERVER, "--replicas", 2),
    ),
    "qemu": Role(
        "an env server with virtual machines",
        (*_HOST, "packages-server", "qemu-packages", "qemu-image", "kvm", "disk", "port-8100"),
        lambda *_: shell_line(ENV_SERVER, "--provider", "qemu"),
    ),
    "desktop_env": Role(
        "an env server over OSWorld's DesktopEnv",
        (*_HOST, "packages-server", "desktop-env", "docker", "disk", "port-8100"),
        lambda *_: shell_line(ENV_SERVER, "--provider", "desktop_env"),
    ),
    "trainer": Role(
        "training with the recipe of --recipe, or demo",
        (*_HOST, "packages-train", "gpu", "torch", "disk", "file-system", "adapters", "locks"),
        lambda state, recipe: pipeline_line(state, "train", "--recipe", recipe),
    ),
    "dagster": Role(
        "Dagster's UI and daemon",
        (*_HOST, "top-level-names", "packages-pipeline", *_DAGSTER, *_STATE, "port-3000"),
        lambda state, _: pipeline_line(state, "dev"),
    ),
    "postgres": Role(
        "Dagster's instance in Postgres",
        ("python", "packages-pipeline", "packages-postgres", *_DAGSTER),
        lambda *_: shell_line(PIPELINE, "init", "--postgres"),
    ),
    "mlflow": Role(
        "MLflow's UI",
        ("python", "packages-pipeline", "mlflow-database", "port-5000"),
        lambda state, _: mlflow_line(state.mlflow_uri),
    ),
    "sglang": Role(
        "an sglang server",
        ("memory", "sglang", "gpu", "disk", "port-30000"),
        lambda *_: shell_line(PIPELINE, "sglang-cpu", "--help"),
    ),
    "ray": Role(
        "a node of a Ray cluster",
        (*_HOST, "packages-train", "packages-ray", "gpu", "torch", "port-8265"),
        lambda *_: shell_line("ray", "start", "--head"),
    ),
}


def checks_of_recipe(recipe: Recipe) -> tuple[str, ...]:
    """Checks of a trainer that this recipe needs in addition."""
    return ("packages-lora",) if recipe.trainer.lora is not None else ()


def make_checks(place: Place) -> list[Check]:
    return [
        one("python", check_python),
        one("top-level-names", check_names, Path.cwd()),
        *(one(f"packages-{extra}", check_extra, extra) for extra in EXTRAS),
        Check(names=DESKTOP_CHECKS, look=partial(check_desktops, place), limit_s=DESKTOPS_LIMIT_S + SPARE_S),
        one("memory", check_memory),
        one("disk", check_disk, place.state),
        one("file-system", check_file_system, place.state),
        one("open-files", check_open_files),
        one("gpu", check_gpu, limit_s=10.0),
        one("torch", check_torch, limit_s=TORCH_LIMIT_S + SPARE_S),
        one("sglang", check_sglang, place.sglang, limit_s=SGLANG_LIMIT_S + SPARE_S),
        one("dagster-home", check_home, place),
        Check(
            names=("dagster-instance", "dagster-daemon"),
            look=partial(check_instance, place),
            limit_s=INSTANCE_LIMIT_S + SPARE_S,
        ),
        one("catalog", check_catalog, place.state, limit_s=CATALOG_LIMIT_S + SPARE_S),
        one("mlflow-database", check_mlflow_database, place.state, limit_s=10.0),
        one("adapters", check_adapters, place.state),
        one("locks", check_locks, place.state),
        _port(3000, "Dagster's UI", ("dagster",), pipeline_line(place.state, "dev", "--port", 3001)),
        _port(5000, "MLflow's UI", ("mlflow",), mlflow_line(place.state.mlflow_uri, port=5001)),
        _port(8100, "the env server", ("env_server", "env-server"), shell_line(ENV_SERVER, "--port", 8101)),
        _port(
            30000,
            "sglang",
            ("sglang",),
            f"serve it at another port ({shell_line(PIPELINE, 'sglang-cpu', 'CHECKPOINT', '--port', 30001)}), and set "
            "engine.urls to that",
        ),
        _port(8265, "Ray's dashboard", ("ray",), shell_line("ray", "start", "--head", "--dashboard-port", 8266)),
    ]


def _port(port: int, purpose: str, own: tuple[str, ...], way_out: str) -> Check:
    return one(f"port-{port}", check_port, port, purpose, own, way_out, PROC)
