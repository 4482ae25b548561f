"""The kinds of providers: each is a package below this one whose module `kind` declares its settings, with their
command line options, and how it is made. To add one, add a package."""

import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from env_server import providers
from env_server.settings import TOKEN_VARIABLE
from env_server.table import Table
from osworld_pipeline.wire.metrics_endpoint import TOKEN_VARIABLE as METRICS_TOKEN_VARIABLE

if TYPE_CHECKING:
    from env_server.driving.driver import Drivers
    from env_server.protocols import Provider
    from env_server.settings import Settings

KIND = "kind"


@dataclass(frozen=True, kw_only=True)
class ProviderKind:
    name: str
    settings: type[Table]
    """Its table in the configuration file, of the same name; every field has a default."""
    make: "Callable[[Settings], Provider]"
    """Raises ValueError or DependencyError if it does not work with these settings, or not on this machine."""
    make_drivers: "Callable[[Settings], Drivers] | None" = None
    """What runs episodes on its desktops; None for the drivers of desktops with a guest agent."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Fields with secrets, each with the environment variable that sets it; no other source may."""
    title: str = ""
    """Title of its options in the help; empty: its name."""
    has_ports: bool = False
    """OSWorld's graders can reach the ports of the browser and VLC on its desktops."""


@cache
def provider_kinds() -> Mapping[str, ProviderKind]:
    """All kinds, by name; `local` first."""
    names = (one.name for one in pkgutil.iter_modules(providers.__path__) if one.ispkg)
    found = [importlib.import_module(f"{providers.__name__}.{name}.{KIND}").KIND for name in names]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: (kind.name != "local", kind.name))}


def environment_for_programs() -> dict[str, str]:
    """The environment of this process without our tokens and passwords, for programs that are not ours."""
    of_kinds = {name for kind in provider_kinds().values() for name in kind.variables.values()}
    secrets = {TOKEN_VARIABLE, METRICS_TOKEN_VARIABLE, *of_kinds}
    return {name: value for name, value in os.environ.items() if name not in secrets}
