"""Generates docs/configuration.md from the resources: their configuration keys, except those of `progress`, with type,
default and meaning, and the environment variables. `python -m resources.describe > docs/configuration.md`"""

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from resources.deployment import TYPES
from resources.desktops import DesktopsOnRay
from resources.local_launcher import LocalLauncher
from resources.program_launcher import ProgramLauncher
from resources.ray_launcher import RayLauncher
from resources.recipe_overrides import Overrides
from resources.start import StartResource

HEAD = """# Configuration
The configuration of a run. This page is generated from the code (`python -m resources.describe >
docs/configuration.md`). Other pages describe the rest:

| what | where |
|---|---|
| the content of a run: model, agent, rewards, training, evaluation | a recipe: every key in [recipes.md](recipes.md) |
| the resources of a run: desktops, engine, launcher, MLflow | Dagster's resources: below |
| an env server | options and a [file](../env_server/example.toml), [explained](../env_server/README.md) |
| Dagster's storage | `dagster.yaml`, or [Postgres](instances.md) |

The commands of `osworld-pipeline` take the recipe (`--recipe`, `--set`, `--smoke`) and the state folder (`--state`);
env servers elsewhere come from `desktop.server_urls` (or `OSWORLD_SERVER_URL`), tokens from the environment.
Everything else is for runs in Dagster: in the launchpad, or in a file for `dagster job launch -w workspace.yaml -j
train -c run.yaml`:
```yaml
resources:
  recipe:
    config: {name: qwen3vl_4b_async, overrides: {desktop: {num_replicas: 64}}}
  desktops:
    config: {urls: ["http://kvm-1:8100", "http://kvm-2:8100"], token: {env: ENV_SERVER_TOKEN}}
  launcher:
    config: {runs_on: {local: {grace_s: 60}}}
```
A resource that a run does not name has its defaults, or what the file of `OSWORLD_DEPLOYMENT` gives it, so that
*Materialize* in Dagster's page uses the recipe, desktops and cluster of your deployment. The file has the same form,
with `resources` alone; `osworld-pipeline init` writes one with examples. `{env: NAME}`, as a value or in a list, is
read from the environment of Dagster when a run starts, so the file can be the same on every machine. A run that names
a resource replaces all values of that one."""
OWN_LAUNCHERS: tuple[tuple[str, type[BaseModel]], ...] = (("local", LocalLauncher), ("ray", RayLauncher))
"""The launchers of this distribution, without those of other installed ones."""
RESOURCES: tuple[tuple[str, type[BaseModel]], ...] = (
    *TYPES.items(),
    ("start", StartResource),
    ("desktops.ray", DesktopsOnRay),
)
OWN_VARIABLES: tuple[tuple[str, str, str], ...] = (
    (
        "ENV_SERVER_TOKEN",
        "env server, Dagster, pipeline, viewer",
        "the bearer token that the server requires and its clients send",
    ),
    ("OSWORLD_VIEWER_TOKEN", "viewer", "the token that the viewer requires beyond loopback"),
    (
        "ENGINE_TOKEN",
        "Dagster, pipeline, weights receiver",
        "the bearer token of sglang servers, or of an OpenAI-compatible endpoint",
    ),
    (
        "OSWORLD_RETRAINING_CRON",
        "Dagster",
        "cron expression of `retraining_schedule` (UTC; five fields); default: 03:00 every day",
    ),
    (
        "MLFLOW_TRACKING_URI",
        "Dagster, pipeline",
        "MLflow's tracking URI, where neither the run nor the deployment file sets `tracking.uri`",
    ),
    ("OSWORLD_VIEWER_URL", "Dagster", "the viewer's address in links; default: http://127.0.0.1:8765"),
    ("OSWORLD_FAILURE_WEBHOOK", "Dagster", "the URL to which each failed run is posted as JSON"),
    (
        "OSWORLD_METRICS",
        "programs, gateway, weights receiver, viewer",
        "`[HOST:]PORT`, where their metrics for Prometheus are served; PORT may be a range, or 0 for any free port",
    ),
    ("OSWORLD_METRICS_TOKEN", "as OSWORLD_METRICS", "the token that a scrape must send; required beyond loopback"),
    ("OSWORLD_SANDBOX_TOKEN", "env server", "the token of a gateway of remote sandboxes"),
    ("WINDOWS_ADMIN_PASSWORD", "env server", "the password for the login of a Windows image"),
    ("OSGYM_ALLOWED_IPS", "env server", "addresses and networks that may use OSGym's worker ports, comma-separated"),
    (
        "OSWORLD_STATE",
        "pipeline, Dagster, node of Ray or another queue",
        "the state folder, unless set by `--state` or the resource `state`; on a node, where the state is mounted, if "
        "not at the launcher's path",
    ),
    (
        "OSWORLD_DEPLOYMENT",
        "Dagster, pipeline",
        "a YAML file with `resources` as in a run's configuration, for runs that do not name them",
    ),
    (
        "OSWORLD_ASSET_PREFIX",
        "Dagster, pipeline",
        "parts before the names of all asset keys, separated by `/`: for an instance with other assets of these names",
    ),
    (
        "OSWORLD_EVALUATION_POOL",
        "Dagster",
        "the pool of evaluations and collections; default: `trainer`, which they share with training",
    ),
    (
        "DAGSTER_HOME",
        "Dagster",
        "the folder with `dagster.yaml`: the project folder, or `STATE/dagster`",
    ),
    ("HF_TOKEN", "`publish`, hub client", "the token of the hub; `publish` needs write access"),
    ("HF_ENDPOINT", "hub client", "the address of a hub other than huggingface.co"),
    (
        "OSWORLD_STATE_REMOTE",
        "Dagster, pipeline",
        "`s3://BUCKET/PREFIX`: the object store of the state, as `state.remote` and `--state-remote` name it",
    ),
    (
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION",
        "Dagster, pipeline",
        "credentials and location of that object store; only read from the environment",
    ),
    ("SGLANG_ENV", "pipeline, programs", "the folder of the Python environment with sglang"),
)
"""(name, readers, meaning). Slime-OSWorld's names are in docs/recipes.md, with the keys that they set."""


def describe() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD, "## Resources", *(_table(name, model, level=3) for name, model in RESOURCES)]
    parts += [
        "## Where programs run\n"
        "`launcher: {config: {runs_on: ...}}` has one of these; [launchers](launchers.md) has details."
    ]
    parts += [_table(f"runs_on: {name}", model, level=3) for name, model in OWN_LAUNCHERS]
    return "\n\n".join([*parts, _variables()]) + "\n"


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a resource or a launcher, by dotted name."""
    for name, model in (*RESOURCES, *OWN_LAUNCHERS):
        for key, field in model.model_fields.items():
            if key != "kind":
                yield f"{name}.{key}", field


def _table(name: str, model: type[BaseModel], *, level: int) -> str:
    lines = [
        f"{'#' * level} {name}",
        _flat(model.__doc__ or ""),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, field in model.model_fields.items():
        if key != "kind":
            meaning = _flat(field.description or "")
            lines.append(f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return "\n".join(lines)


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if annotation is type(None):
        return "nothing"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in get_args(annotation))
    if origin is list:
        return f"list of {_type(get_args(annotation)[0])}"
    if origin is dict:
        return "names and values"
    if annotation is Overrides:
        return "sections with [keys](recipes.md)"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if annotation is DesktopsOnRay:
        return "[keys](#desktopsray)"
    return names.get(annotation) or f"`{annotation.model_fields['kind'].default}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, ProgramLauncher):
        return f"`{value.kind}`"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    return f"`{value}`" if value not in ("", [], {}) else "empty"


def _variables() -> str:
    lines = [
        "## Environment variables",
        "Slime-OSWorld's names, and the keys that they set, are in [recipes.md](recipes.md#environment).",
        "",
    ]
    lines += ["| variable | read by | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {who} | {what} |" for name, who, what in OWN_VARIABLES]
    lines.append(
        "\nSecrets come only from the environment: a run's configuration names a token "
        "(`{env: ENV_SERVER_TOKEN}`) without its value, and no command has one as an argument."
    )
    return "\n".join(lines)


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(describe(), end="")
