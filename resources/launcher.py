"""Runs the programs of `osworld_pipeline.runs` where the configuration says."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.job import Job
from osworld_pipeline.runs.messages import Report
from osworld_pipeline.runs.placement import Placement, RayDesktops
from resources.local_launcher import LocalLauncher
from resources.program_launcher import ProgramLauncher, further_launchers
from resources.ray_launcher import RayLauncher

LAUNCHERS: Mapping[str, type[ProgramLauncher]] = {"local": LocalLauncher, "ray": RayLauncher, **further_launchers()}
if TYPE_CHECKING:
    AnyLauncher = ProgramLauncher
else:
    AnyLauncher = Union[tuple(LAUNCHERS.values())]  # noqa: UP007 - its members are known only now


class Launcher(dg.ConfigurableResource):
    """Starts programs and receives their messages. In a run's configuration: `launcher: {config: {runs_on: {ray:
    {...}}}}`."""

    runs_on: AnyLauncher = Field(
        default=LocalLauncher(),
        discriminator="kind",
        description="`local`: this machine; `ray`: a Ray cluster; or the name of an installed launcher.",
    )

    def launch(
        self,
        context: dg.AssetExecutionContext,
        program: str,
        job: Job | Mapping[str, Any],
        on_message: Report,
        *,
        state: StateDir,
        num_processes: int = 1,
    ) -> dict[str, Any]:
        """Runs `program` to its end, as `num_processes` ranks; `on_message` receives all messages except the last; the
        output goes to a log file. A program of the user may take a mapping as its job; it is placed as one that trains.

        Returns the program's result. Raises dg.Failure with the program's own error when it fails, and without a retry
        when the step is cancelled, after the program has ended.
        """
        sent, placement = job, Placement.RANK
        if isinstance(job, Job):
            sent, placement = job.model_dump(mode="json"), job.placement
            if RayDesktops.of_job(sent) is not None and not self.runs_on.starts_desktops:
                raise dg.Failure(
                    "the desktops run on Ray (desktops.ray), and this launcher does not run programs there: set "
                    "launcher.runs_on to ray, or desktops.urls to env servers",
                    allow_retries=False,
                )
        return self.runs_on.launch(
            context, program, sent, on_message, state=state, num_processes=num_processes, placement=placement
        )
