"""The whole result: findings, and whether this machine can take each role, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from osworld_pipeline.doctor.checkup import Check, lacking, run_checks
from osworld_pipeline.doctor.roles import ROLES, Role
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.state import StateDir

COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "red", Status.BROKEN: "magenta"}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    role: str
    """The requested role."""
    findings: Mapping[str, Finding]
    lacks: Mapping[str, Sequence[str]]
    """The failed checks that prevent each checked role, by role."""
    seconds: float

    @property
    def is_ok(self) -> bool:
        return not self.lacks[self.role]

    def next_step(self, state: StateDir, recipe: str) -> str:
        """The one thing to do: the remedy of the first failed check, or the command of a ready role."""
        for name in self.lacks[self.role]:
            finding = self.findings[name]
            return finding.remedy or f"look into {name}: {finding.message}"
        return ROLES[self.role].start(state, recipe)

    def as_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "ok": self.is_ok,
            "seconds": round(self.seconds, 3),
            "roles": {name: {"ok": not lacks, "lacks": list(lacks)} for name, lacks in self.lacks.items()},
            "findings": [finding.as_json() for finding in self.findings.values()],
        }


def diagnose(
    checks: Sequence[Check], *, role: str, is_only: bool, more: Sequence[str] = (), seconds: float = 0.0
) -> Diagnosis:
    """`is_only`: check only what the role needs; else what any role needs. `more`: checks that this role needs in
    addition."""
    asked = replace(ROLES[role], checks=(*ROLES[role].checks, *more))
    roles: Mapping[str, Role] = {role: asked} if is_only else {**ROLES, role: asked}
    wanted = [name for each in roles.values() for name in each.checks]
    findings = {finding.name: finding for finding in run_checks(checks, wanted=wanted)}
    lacks = {name: lacking(each.checks, findings) for name, each in roles.items()}
    return Diagnosis(role=role, findings=findings, lacks=lacks, seconds=seconds)


def show(diagnosis: Diagnosis, console: Console) -> None:
    table = Table(show_lines=False, pad_edge=False, box=None)
    for name in ("", "check", "finding and remedy"):
        table.add_column(name, no_wrap=name != "finding and remedy", overflow="fold")
    for finding in diagnosis.findings.values():
        text = escape(finding.message)
        if finding.remedy and finding.status != Status.OK:
            text += f"\n[bold]→ {escape(finding.remedy)}[/]"
        colour = COLOURS[finding.status]
        table.add_row(f"[{colour}]{finding.status.value}[/]", finding.name, text)
    console.print(table)
    console.print()
    for name, lacks in diagnosis.lacks.items():
        mark = f"[red]lacks {', '.join(lacks)}[/]" if lacks else "[green]ready[/]"
        here = " [bold](requested)[/]" if name == diagnosis.role and len(diagnosis.lacks) > 1 else ""
        console.print(f"{name:<12} {ROLES[name].meaning}: {mark}{here}", highlight=False, soft_wrap=True)
