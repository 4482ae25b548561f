"""The Dagster jobs, with their sensors and schedules. A sensor or schedule of any module here is loaded."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

Definition = TypeVar("Definition")


def definitions_of(kind: type[Definition]) -> list[Definition]:
    """The objects of this type in the modules of this package."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, kind)}
    return list(found.values())
