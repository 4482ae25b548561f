"""Runs a program of `osworld_pipeline.runs` as a Ray job, on nodes with the resources that it needs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from osworld_pipeline.runs.launch.job_queue import JobQueue
from osworld_pipeline.runs.launch.local_ray import RayCluster, local_ray
from osworld_pipeline.runs.launch.mailbox import mailbox_folder
from osworld_pipeline.runs.placement import RayResources, RayShare
from resources.local_launcher import PROGRAM_ENV
from resources.queue_launcher import QueueLauncher, Request

JOB_ENV = {**PROGRAM_ENV, "RAY_TRAIN_V2_ENABLED": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
"""On a Ray cluster started here all processes have these variables; on an existing cluster they are sent with the job,
whose workers then start slightly slower."""


class RayLauncher(QueueLauncher):
    """Programs as jobs of a Ray cluster whose machines share the state folder and have this package installed."""

    runs_several_ranks: ClassVar[bool] = True
    starts_desktops: ClassVar[bool] = True
    kind: Literal["ray"] = "ray"
    address: str | None = Field(
        default=None,
        description="The dashboard's URL, such as http://head:8265; without one, each program starts a local Ray.",
    )
    token: str | None = Field(default=None, description="The cluster's authentication token; give it as an EnvVar.")
    python: str | None = Field(
        default=None, description="Python on the cluster; default: `python`, or this interpreter for a local Ray."
    )
    cpus_per_rank: float = Field(default=1.0, gt=0, description="CPUs of a training rank, as counted by Ray.")
    gpus_per_rank: float = Field(default=0.0, ge=0, description="GPUs of a training rank; 0 trains on CPUs over gloo.")
    memory_gb_per_rank: float = Field(default=0.0, ge=0, description="GiB of memory of a rank; 0 reserves none.")
    resources_per_rank: dict[str, float] = Field(
        default={}, description="Further resources of a rank, by the names of `ray start --resources`."
    )
    num_rollout_actors: int = Field(
        default=0,
        ge=0,
        description="Ray actors that run the episodes of every program; 0 runs them in the program itself.",
    )
    cpus_per_rollout_actor: float = Field(default=1.0, gt=0, description="CPUs of one actor.")
    gpus_per_rollout_actor: float = Field(default=0.0, ge=0, description="GPUs of one actor.")
    memory_gb_per_rollout_actor: float = Field(default=0.0, ge=0, description="GiB of memory of one actor.")
    resources_per_rollout_actor: dict[str, float] = Field(
        default={}, description="Further resources of one actor, such as {desktop: 1}."
    )
    cpus_per_driver: float = Field(
        default=1.0, ge=0, description="CPUs of a program that only directs ranks or actors."
    )
    resources_per_driver: dict[str, float] = Field(
        default={},
        description="Further resources of such a program; without these and without CPUs it runs on the head node.",
    )

    @contextmanager
    def open_queue(self, request: Request) -> Iterator[JobQueue]:
        """See QueueLauncher.open_queue. Raises DependencyError: without an address, Ray must be installed here."""
        from osworld_pipeline.runs.launch.ray_jobs import RayJobs  # an HTTP client: not when definitions are loaded

        resources = self._share.entrypoint(request.placement, request.num_processes)
        with (
            self._open_cluster(request, resources) as cluster,
            RayJobs(
                cluster,
                resources,
                python=self.python or (sys.executable if self.address is None else "python"),
                env_vars={} if self.address is None else JOB_ENV,
                metadata={"program": request.program, "dagster_run_id": request.run_id},
            ) as jobs,
        ):
            yield jobs

    def job_module(self) -> str:
        """Starts several ranks as workers of a TorchTrainer, and connects to Ray for rollout actors."""
        return "osworld_pipeline.runs.launch.ray_job"

    def job_additions(self) -> Mapping[str, Any]:
        """The job's share of the cluster."""
        return {"ray": self._share.model_dump()}

    @contextmanager
    def _open_cluster(self, request: Request, entrypoint: RayResources) -> Iterator[RayCluster]:
        if self.address is not None:
            yield RayCluster(url=self.address, token=self.token)
            return
        share, num_processes = self._share, request.num_processes
        ranks = [share.rank] * num_processes if num_processes > 1 else []
        wanted = [entrypoint, *ranks, *[share.rollout_actor] * share.num_rollout_actors]
        wanted += request.desktops.servers if request.desktops is not None else ()
        log_path, mailbox = request.state.logs / "ray.log", mailbox_folder(request.state, request.name)
        with local_ray(log_path, wanted, env_vars=JOB_ENV, mailbox=mailbox) as cluster:
            yield cluster

    @property
    def _share(self) -> RayShare:
        return RayShare(
            rank=RayResources(
                cpus=self.cpus_per_rank,
                gpus=self.gpus_per_rank,
                memory_gb=self.memory_gb_per_rank,
                custom=self.resources_per_rank,
            ),
            rollout_actor=RayResources(
                cpus=self.cpus_per_rollout_actor,
                gpus=self.gpus_per_rollout_actor,
                memory_gb=self.memory_gb_per_rollout_actor,
                custom=self.resources_per_rollout_actor,
            ),
            driver=RayResources(cpus=self.cpus_per_driver, custom=self.resources_per_driver),
            num_rollout_actors=self.num_rollout_actors,
            start_timeout_s=self.start_timeout_s,
        )
