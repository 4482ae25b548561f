"""Runs the programs of `osworld_pipeline.runs` on this machine or on a Ray cluster, as configured."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.job import Job
from osworld_pipeline.runs.messages import Report
from resources.local_launcher import LocalLauncher
from resources.ray_launcher import RayLauncher


class Launcher(dg.ConfigurableResource):
    """Starts programs and receives their messages. In a run's configuration: `launcher: {config: {runs_on: {ray:
    {...}}}}`."""

    runs_on: LocalLauncher | RayLauncher = Field(
        default=LocalLauncher(), discriminator="kind", description="`local`: this machine; `ray`: a Ray cluster."
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
        output goes to a log file. A program of the user may take a mapping as its job.

        Returns the program's result. Raises dg.Failure with the program's own error when it fails, and without a retry
        when the step is cancelled, after the program has ended.
        """
        sent = job.model_dump(mode="json") if isinstance(job, Job) else job
        return self.runs_on.launch(context, program, sent, on_message, state=state, num_processes=num_processes)
