"""`python -m benchmarks.bench_scale [--quick]`: OSGym's scaling figures (arXiv 2511.11672) measured on this machine,
and from them a model of cost and a simulation of 1,024 replicas over 16 hosts.

Every figure is marked as measured, assumed or simulated."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.processes import BenchmarkError
from benchmarks.scale_cost import HostKind, Need, cost_of, disk_saved_share
from benchmarks.scale_measure import (
    STEPS_A_TRAJECTORY,
    Level,
    Machines,
    Provisioning,
    level_fields,
    measure_level,
    measure_provisioning,
    measure_qemu,
    print_levels,
)
from benchmarks.scale_simulation import Failures, Fleet, Report, Times, simulate
from benchmarks.spread import Spread, print_table, show_machine
from osworld_pipeline.errors import PipelineError

NUM_REPLICAS = 1024
THEIRS = {"start": "0.8 s", "boot": "30 s", "disk": "88%", "rate": "1,420 (>1,000 replicas)", "cost": "$0.2-0.3"}
"""OSGym's paper; other machines, other tasks."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    console = Console(width=max(170, Console().width))
    about = show_machine(console)
    try:
        results = _run(console, arguments)
    except (BenchmarkError, PipelineError) as error:
        print(f"bench-scale: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


def _run(console: Console, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    host = HostKind(cores=arguments.host_cores, memory_gb=arguments.host_gb, usd_per_hour=arguments.host_usd_per_hour)
    provisioning = measure_provisioning(arguments.state_dir, 2 if arguments.quick else 8)
    levels = [measure_level(arguments.state_dir, count, seconds=arguments.seconds) for count in arguments.replicas]
    machines = None
    if arguments.qemu:
        machines = measure_qemu(console, arguments.qemu_state_dir, rounds=1 if arguments.quick else 3)
    print_levels(console, levels)
    _print_provisioning(console, provisioning, machines)
    _print_cost(console, levels, machines, host, step_s=arguments.step_s)
    report = _simulate(levels, provisioning, arguments)
    _print_report(console, report, arguments)
    return [
        {
            "bench": "provisioning",
            "start_s": provisioning.start_s.fields(),
            "reset_s": provisioning.reset_s.fields(),
            "image_mb": round(provisioning.image_mb, 1),
            "own_disk_mb": round(provisioning.own_disk_mb, 2),
        },
        *map(level_fields, levels),
        {"bench": "simulation", **report.fields()},
    ]


def _print_provisioning(console: Console, local: Provisioning, machines: Machines | None) -> None:
    rows = [_disk_row("local", local.start_s, local.image_mb, local.own_disk_mb)]
    if machines is not None:
        rows.append(_disk_row("qemu, restored", machines.start_s, machines.image_mb, machines.own_disk_mb))
        rows.append(("qemu, cold boot", machines.boot_s.quartile_text(2), "", "", ""))
    rows.append(("OSGym's paper", f"{THEIRS['start']} (full copy: {THEIRS['boot']})", "", "", THEIRS["disk"]))
    title = (
        f"Provisioning; reset of local: {local.reset_s.quartile_text(2)} s; local uses the host's own "
        "programs, so its saving cannot be compared with a machine's"
    )
    columns = ("provider", "provisioning, s", "image once, MB", "each replica, MB", "disk saved at 64")
    print_table(console, title, columns, rows)


def _disk_row(name: str, start_s: Spread, image_mb: float, own_mb: float) -> tuple[str, ...]:
    saved = disk_saved_share(shared_mb=image_mb, own_mb=own_mb, num_replicas=64)
    return name, start_s.quartile_text(2), f"{image_mb:.1f}", f"{own_mb:.2f}", f"{saved:.1%}"


def _print_cost(
    console: Console, levels: Sequence[Level], machines: Machines | None, host: HostKind, *, step_s: float
) -> None:
    busiest = levels[-1]
    needs = {"local": Need(memory_mb=busiest.memory_mb.median, cores=busiest.cores_at(step_s))}
    if machines is not None:
        # The guest's own CPU time cannot be measured when it is emulated, so that of a local desktop is used.
        needs["qemu (CPU as local)"] = Need(memory_mb=machines.memory_mb.median, cores=busiest.cores_at(step_s))
    rows = []
    for name, need in needs.items():
        cost = cost_of(need, host, num_replicas=NUM_REPLICAS)
        figures = (f"{need.memory_mb:.0f}", f"{need.cores:.3f}", str(cost.per_host), cost.limited_by)
        rows.append((name, *figures, str(cost.num_hosts), f"{cost.usd_per_replica_day:.3f}"))
    rows.append(("OSGym's paper", "", "", "", "", "", THEIRS["cost"]))
    columns = ("provider", "MB", "cores", "a host holds", "limited by", f"hosts of {NUM_REPLICAS}", "$ a replica-day")
    title = (
        f"Cost, modelled: measured memory and CPU at a step every {step_s:g} s; assumed: hosts of {host.cores:g} cores "
        f"and {host.memory_gb:g} GB at ${host.usd_per_hour:g} an hour"
    )
    print_table(console, title, columns, rows)


def _simulate(levels: Sequence[Level], provisioning: Provisioning, arguments: argparse.Namespace) -> Report:
    # Times of a single desktop, because the simulated host's cores bound the number of concurrent ones.
    thinking_s = arguments.step_s * STEPS_A_TRAJECTORY
    times = Times(
        start_s=provisioning.start_s.values,
        reset_s=provisioning.reset_s.values,
        episode_s=tuple(value + thinking_s for value in levels[0].episode_s.values),
    )
    fleet = Fleet(
        num_hosts=arguments.hosts,
        replicas_per_host=arguments.replicas_per_host,
        num_policies=arguments.hosts * arguments.replicas_per_host,
        simulated_s=arguments.simulated_s,
    )
    # Do not log thousands of simulated failures.
    logger = logging.getLogger("env_server")
    level, logger.level = logger.level, logging.CRITICAL
    try:
        return simulate(fleet, times, _failures(arguments), seed=arguments.seed)
    finally:
        logger.level = level


def _failures(arguments: argparse.Namespace) -> Failures:
    return Failures(desktop_mtbf_s=3600 * arguments.desktop_mtbf_h, host_mtbf_s=3600 * arguments.host_mtbf_h)


def _print_report(console: Console, report: Report, arguments: argparse.Namespace) -> None:
    counts = list(report.episodes_by_client.values()) or [0]
    rows = [
        ("trajectories a minute", f"{report.episodes_per_min:.0f}", f"paper: {THEIRS['rate']}"),
        ("replicas in use", f"{report.busy_share:.1%}", "of their time"),
        ("wait for a desktop, s", Spread.of(report.lease_wait_s).quartile_text(2), "median and quartiles"),
        ("the same, p95 and longest, s", _ends(report.lease_wait_s), ""),
        ("from a fault to the next desktop, p95 and longest, s", _ends(report.recovery_s), "faults that were survived"),
        ("episodes lost", str(report.faults["desktop died"] + report.faults["host died"]), _causes(report)),
        ("hosts that failed", str(report.num_host_failures), "and restarted"),
        ("fairness, fewest and most of a client", f"{min(counts)} / {max(counts)}", "episodes"),
    ]
    failures = _failures(arguments)
    title = (
        f"Simulated: {report.num_replicas} replicas on {arguments.hosts} hosts for {report.simulated_s:g} s (took "
        f"{report.took_s:.1f} s), the real pool's queueing and recovery; measured starts, resets and steps; assumed: "
        f"a step every {arguments.step_s:g} s, a desktop dies every {failures.desktop_mtbf_s / 3600:g} h, "
        f"{failures.failed_start_share:.0%} of starts fail, a host fails every {failures.host_mtbf_s / 3600:g} h "
        f"for {failures.host_down_s:g} s"
    )
    print_table(console, title, ("figure", "value", ""), rows)


def _ends(values: Sequence[float]) -> str:
    if not values:
        return "none"
    spread = Spread.of(values)
    return f"{spread.quantile(0.95):.2f} / {spread.values[-1]:.2f}"


def _causes(report: Report) -> str:
    return ", ".join(f"{cause}: {count}" for cause, count in sorted(report.faults.items()))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small level, no qemu, 16 simulated replicas")
    parser.add_argument("--replicas", type=int, nargs="+", metavar="N", help="levels to measure (default 1 4 8)")
    parser.add_argument("--seconds", type=float, help="time of each level (default 30)")
    parser.add_argument("--no-qemu", dest="qemu", action="store_false", help="leave the virtual machines out")
    parser.add_argument("--state-dir", type=Path, default=Path("var/desktops"), help="folder of the local image")
    parser.add_argument("--qemu-state-dir", type=Path, default=Path("var/desktops"), help="folder of qemu's image")
    parser.add_argument("--step-s", type=float, default=8.0, help="time of a policy's step, model included (default 8)")
    parser.add_argument("--host-cores", type=float, default=64.0)
    parser.add_argument("--host-gb", type=float, default=512.0)
    parser.add_argument("--host-usd-per-hour", type=float, default=4.0)
    parser.add_argument("--hosts", type=int, help="simulated (default 16)")
    parser.add_argument("--replicas-per-host", type=int, help="simulated (default 64)")
    parser.add_argument("--simulated-s", type=float, help="(default 600)")
    parser.add_argument("--desktop-mtbf-h", type=float, default=1.0)
    parser.add_argument("--host-mtbf-h", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    arguments = parser.parse_args(argv)
    quick: dict[str, Any] = {"replicas": [1], "seconds": 1.0, "hosts": 2, "replicas_per_host": 8, "simulated_s": 120.0}
    full: dict[str, Any] = {
        "replicas": [1, 4, 8], "seconds": 30.0, "hosts": 16, "replicas_per_host": 64, "simulated_s": 600.0
    }  # fmt: skip
    for name, value in (quick if arguments.quick else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.qemu = arguments.qemu and not arguments.quick
    return arguments


if __name__ == "__main__":
    sys.exit(main())
