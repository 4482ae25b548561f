"""Cost of a replica a day on a rented host: memory and cores limit the number of replicas, which share the rent."""

import math
from dataclasses import dataclass

MEMORY_SHARE = 0.9
"""Share of a host's memory for replicas."""
CORE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class HostKind:
    """Assumed: size and rent of a host."""

    cores: float = 64.0
    memory_gb: float = 512.0
    usd_per_hour: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Needs of one replica, measured."""

    memory_mb: float
    cores: float
    """Average use at the pace of a policy."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    per_host: int
    """Replicas."""
    num_hosts: int
    limited_by: str
    usd_per_replica_day: float


def cost_of(need: Need, host: HostKind, *, num_replicas: int = 1024) -> Cost:
    """
    Raises:
        ValueError: one replica does not fit, or the need is not positive.
    """
    if need.memory_mb <= 0 or need.cores <= 0:
        raise ValueError(f"a replica needs memory and CPU, not {need.memory_mb:g} MB and {need.cores:g} cores")
    by_memory = math.floor(host.memory_gb * 1e3 * MEMORY_SHARE / need.memory_mb)
    by_cores = math.floor(host.cores * CORE_SHARE / need.cores)
    per_host = min(by_memory, by_cores)
    if per_host < 1:
        raise ValueError(
            f"a replica of {need.memory_mb:.0f} MB and {need.cores:.2f} cores does not fit on a host of "
            f"{host.memory_gb:g} GB and {host.cores:g} cores"
        )
    num_hosts = math.ceil(num_replicas / per_host)
    return Cost(
        per_host=per_host,
        num_hosts=num_hosts,
        limited_by="memory" if by_memory <= by_cores else "CPU",
        usd_per_replica_day=24.0 * host.usd_per_hour * num_hosts / num_replicas,
    )


def disk_saved_share(*, shared_mb: float, own_mb: float, num_replicas: int) -> float:
    """Share of the disk of full copies that one shared image with overlays saves."""
    full = num_replicas * (shared_mb + own_mb)
    return 1.0 - (shared_mb + num_replicas * own_mb) / full
