"""The resources of one deployment, for runs whose configuration does not name them; a run that names one replaces all
its values. They come from the file that OSWORLD_DEPLOYMENT names, in the format of a run's configuration:

    resources:
      recipe: {config: {name: recipe.toml}}
      launcher: {config: {runs_on: {ray: {address: "http://head:8265", token: {env: RAY_CLUSTER_TOKEN}}}}}
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import yaml

from osworld_pipeline.domain.near_names import did_you_mean
from osworld_pipeline.domain.state import REMOTE_VARIABLE
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.recipes.environment import own_variables
from resources.desktops import DesktopsOnRay, DesktopsResource
from resources.engine import EngineResource
from resources.launcher import LAUNCHERS, Launcher
from resources.program_launcher import ProgramLauncher
from resources.state import RecipeResource, StateResource, configured_state
from resources.tracking import TrackingResource

DEPLOYMENT_VARIABLE = "OSWORLD_DEPLOYMENT"
TYPES: Mapping[str, type[dg.ConfigurableResource]] = {
    "state": StateResource,
    "recipe": RecipeResource,
    "desktops": DesktopsResource,
    "engine": EngineResource,
    "tracking": TrackingResource,
    "launcher": Launcher,
}

Made = TypeVar("Made", bound=dg.ConfigurableResource | dg.Config)


def deployment_resources(environment: Mapping[str, str]) -> dict[str, dg.ConfigurableResource]:
    """Raises PipelineError: the file cannot be read, or has an unknown name or a wrong value; names it."""
    defaults: dict[str, dict[str, Any]] = {
        "state": {"path": configured_state(environment), "remote": environment.get(REMOTE_VARIABLE, "")},
        "recipe": {"environment": own_variables(environment)},
        "desktops": {"token": _secret("ENV_SERVER_TOKEN", environment)},
        "engine": {"token": _secret("ENGINE_TOKEN", environment)},
    }
    path = environment.get(DEPLOYMENT_VARIABLE)
    given = _read(Path(path)) if path else {}
    return {name: _resource(name, defaults.get(name, {}) | given.get(name, {}), path) for name in TYPES}


def deployment_tracking(environment: Mapping[str, str]) -> TrackingResource:
    """The tracking resource for commands, which Dagster does not run: its values from the environment are read here.
    Raises PipelineError, as `deployment_resources`."""
    configured = deployment_resources(environment)["tracking"]
    for _, value in configured:
        if isinstance(value, dg.EnvVar) and value.get_value() is None:
            why = f"`tracking` takes a value from {value.env_var_name}, which is not set"
            raise _refuse(environment[DEPLOYMENT_VARIABLE], why)
    tracking = configured.process_config_and_initialize()
    assert isinstance(tracking, TrackingResource)
    return tracking


def _secret(variable: str, environment: Mapping[str, str]) -> dg.EnvVar | None:
    """Dagster stores the name of the variable and reads its value on use; None if it is not set."""
    return dg.EnvVar(variable) if environment.get(variable) else None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    refuse = partial(_refuse, str(path))
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise refuse(str(error)) from error
    if not isinstance(loaded, dict) or loaded.keys() != {"resources"}:
        raise refuse("it must have the one key `resources`, as in a run's configuration")
    resources = loaded["resources"] or {}
    if not isinstance(resources, dict):
        raise refuse(f"`resources` must have keys that are names of resources: {', '.join(TYPES)}")
    for name, entry in resources.items():
        if name not in TYPES:
            raise refuse(f"there is no resource `{name}`{did_you_mean(str(name), TYPES)}")
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict) or len(entry) > 1:
            raise refuse(f"`{name}` must have the one key `config`")
    return {name: entry["config"] for name, entry in resources.items()}


def _resource(name: str, config: Mapping[str, Any], path: str | None) -> dg.ConfigurableResource:
    try:
        values = {key: _value(value) for key, value in config.items()}
        if "runs_on" in values:
            values["runs_on"] = _launcher(values["runs_on"])
        if isinstance(values.get("ray"), dict):
            values["ray"] = _checked(DesktopsOnRay, values["ray"])
        return _checked(TYPES[name], values)
    except ValueError as error:
        raise _refuse(path or "the environment", f"`{name}`: {error}") from error


def _checked(made: type[Made], values: Mapping[str, Any]) -> Made:
    """Raises ValueError: an unknown key, which Dagster's classes ignore, or a wrong value."""
    for key in values:
        if key not in made.model_fields:
            raise ValueError(f"there is no key `{key}`{did_you_mean(str(key), made.model_fields)}")
    return made(**values)


def _launcher(chosen: Any) -> ProgramLauncher:
    """Raises ValueError."""
    if not isinstance(chosen, dict) or len(chosen) != 1 or not chosen.keys() <= LAUNCHERS.keys():
        raise ValueError(f"`runs_on` must have one key: {' or '.join(LAUNCHERS)}")
    ((kind, config),) = chosen.items()
    return _checked(LAUNCHERS[kind], config or {})


def _value(value: Any) -> Any:
    """`{env: NAME}` is read from the environment on use, as in a run's configuration."""
    if isinstance(value, dict):
        if value.keys() == {"env"}:
            return dg.EnvVar(str(value["env"]))
        return {key: _value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_value(inner) for inner in value]
    return value


def _refuse(where: str, why: str) -> PipelineError:
    return PipelineError(f"{where} ({DEPLOYMENT_VARIABLE}): {why}")
