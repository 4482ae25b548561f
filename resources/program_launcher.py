"""What every launcher offers. Further launchers are entry points of the group `osworld_pipeline.launchers`."""

from abc import abstractmethod
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar

import dagster as dg

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.placement import Placement

ENTRY_POINTS = "osworld_pipeline.launchers"


class ProgramLauncher(dg.Config):
    """Starts programs in one kind of place. A subclass has its name in the field `kind: Literal["name"] = "name"`."""

    starts_desktops: ClassVar[bool] = False
    """Whether it starts the desktops of a job's `servers.on_ray`."""

    @abstractmethod
    def launch(
        self,
        context: dg.AssetExecutionContext,
        program: str,
        job: Mapping[str, Any],
        on_message: Report,
        *,
        state: StateDir,
        num_processes: int = 1,
        placement: Placement = Placement.RANK,
    ) -> dict[str, Any]:
        """Does the same as Launcher.launch. `job` is sent as JSON; `placement`: what the program computes in its own
        process."""


def further_launchers() -> dict[str, type[ProgramLauncher]]:
    """The launchers of other installed distributions, by name.

    Raises:
        DependencyError: one cannot be imported, or is no launcher of its name; names its distribution.
    """
    found: dict[str, type[ProgramLauncher]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        origin = f"the launcher {point.name!r} of {point.dist.name if point.dist else point.value}"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise DependencyError(f"{origin} cannot be imported ({error}): uninstall or update it") from error
        if not (isinstance(loaded, type) and issubclass(loaded, ProgramLauncher)):
            raise DependencyError(f"{origin} is not a subclass of resources.program_launcher.ProgramLauncher")
        kind = loaded.model_fields.get("kind")
        if kind is None or kind.default != point.name:
            raise DependencyError(f'{origin} must have the field kind: Literal["{point.name}"] = "{point.name}"')
        found[point.name] = loaded
    return found
