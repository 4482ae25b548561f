"""Runs checks side by side, each within its own time. Whatever a check does, its names come back as findings."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.errors import PipelineError


@dataclass(frozen=True, kw_only=True)
class Check:
    names: tuple[str, ...]
    """Of the findings it gives."""
    look: Callable[[], Iterable[Finding]]
    limit_s: float


def run_checks(checks: Sequence[Check], *, wanted: Iterable[str] | None = None) -> list[Finding]:
    """A finding for every wanted name (all without), in the order of the checks. A check that hangs is left behind in a
    thread that does not keep the program from ending."""
    names = set(wanted) if wanted is not None else {name for check in checks for name in check.names}
    chosen = [check for check in checks if names & set(check.names)]
    heard: queue.SimpleQueue[tuple[Check, Finding | None, str]] = queue.SimpleQueue()
    began = time.monotonic()
    for check in chosen:
        threading.Thread(target=_look, args=(check, heard.put), name=check.names[0], daemon=True).start()
    found: dict[str, Finding] = {}
    waiting = list(chosen)
    while waiting:
        next_end = began + min(check.limit_s for check in waiting)
        try:
            check, finding, reason = heard.get(timeout=max(0.0, next_end - time.monotonic()))
        except queue.Empty:
            now = time.monotonic()
            for late in [check for check in waiting if began + check.limit_s <= now]:
                waiting.remove(late)
                _fill(found, late, f"the check did not end within {late.limit_s:g} s")
            continue
        if finding is not None:
            found.setdefault(finding.name, finding)
        elif check in waiting:
            waiting.remove(check)
            _fill(found, check, reason)
    return [found[name] for check in chosen for name in check.names if name in names]


def _look(check: Check, tell: Callable[[tuple[Check, Finding | None, str]], None]) -> None:
    reason = "the check gave no answer"
    try:
        for finding in check.look():
            tell((check, finding, ""))
    except PipelineError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a check that fails is a finding, and the others go on
        reason = f"the check failed: {type(error).__name__}: {error}"
    tell((check, None, reason))


def _fill(found: dict[str, Finding], check: Check, reason: str) -> None:
    for name in check.names:
        found.setdefault(name, Finding(name=name, status=Status.BROKEN, message=reason))


def one(name: str, look: Callable[..., Finding], *arguments: object, limit_s: float = 5.0) -> Check:
    """A check of one name; `look` is called with the name first."""
    return Check(names=(name,), look=partial(_only, look, name, *arguments), limit_s=limit_s)


def _only(look: Callable[..., Finding], *arguments: object) -> Iterable[Finding]:
    yield look(*arguments)


def lacking(names: Iterable[str], findings: Mapping[str, Finding]) -> list[str]:
    """Those of `names` that keep a role from working."""
    return [name for name in names if findings[name].status in (Status.MISSING, Status.BROKEN)]
