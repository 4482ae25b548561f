"""The resources of a program in a cluster."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Placement(StrEnum):
    """What a program computes in its own process, which determines its resources in a cluster."""

    RANK = "rank"
    """It trains."""
    ROLLOUTS = "rollouts"
    """It runs episodes with an engine."""
    DRIVER = "driver"
    """It directs other processes, or needs little."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RayResources(_Section):
    """Resources of one process, as Ray counts them."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float = 0.0
    """GiB of memory; 0 reserves none."""
    custom: Mapping[str, float] = Field(default_factory=dict)
    """Amounts by the names that nodes were started with."""

    def actor_options(self) -> dict[str, Any]:
        """The options of a Ray actor or task."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.custom)}
        return options | ({"memory": self.memory_bytes} if self.memory_bytes else {})

    def bundle(self) -> dict[str, float]:
        """The resources of a worker of a TorchTrainer."""
        known = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in known.items() if amount} | dict(self.custom)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 2**30)

    def times(self, count: int) -> "RayResources":
        """The resources of `count` such processes."""
        return RayResources(
            cpus=self.cpus * count,
            gpus=self.gpus * count,
            memory_gb=self.memory_gb * count,
            custom={name: amount * count for name, amount in self.custom.items()},
        )

    def __str__(self) -> str:
        named = {"CPUs": self.cpus, "GPUs": self.gpus, "GiB of memory": self.memory_gb, **self.custom}
        return ", ".join(f"{amount:g} {name}" for name, amount in named.items() if amount) or "no resources"


class RayShare(_Section):
    """A job's share of a Ray cluster."""

    rank: RayResources = RayResources()
    rollout_actor: RayResources = RayResources()
    driver: RayResources = RayResources()
    num_rollout_actors: int = 0
    """0: the program runs its own episodes."""
    start_timeout_s: float = 600.0

    def entrypoint(self, placement: Placement, num_ranks: int) -> RayResources:
        """The resources of the program's own process. This process also is the rank if there is only one (several are
        separate workers), and runs the episodes if there are no rollout actors."""
        if placement is Placement.RANK and num_ranks == 1:
            return self.rank
        if placement is Placement.ROLLOUTS and self.num_rollout_actors == 0:
            return self.rollout_actor
        return self.driver


class RayDesktops(_Section):
    """Env servers that run on a job's Ray cluster as long as the job."""

    sizes: tuple[int, ...]
    """The desktops of each server."""
    per_desktop: RayResources
    folder: str
    """Folder of images and replicas, on each node; `~` is the home folder there."""
    options: tuple[str, ...]
    """Further options of `env-server`."""
    ready_timeout_s: float
    """How long a server may take to start its first desktop."""

    def server(self, size: int) -> RayResources:
        """The resources of a server of so many desktops."""
        return self.per_desktop.times(size)

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> "RayDesktops | None":
        """`job`: as plain values; None if it starts no desktops."""
        found = (job.get("servers") or {}).get("on_ray")
        return None if found is None else cls.model_validate(found)

    @property
    def servers(self) -> tuple[RayResources, ...]:
        return tuple(map(self.server, self.sizes))
