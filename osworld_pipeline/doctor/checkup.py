"""Runs checks in parallel, each with its own time limit. All names of a check have findings, even if it fails."""

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
    """Names of its findings."""
    look: Callable[[], Iterable[Finding]]
    limit_s: float


def run_checks(checks: Sequence[Check], *, wanted: Iterable[str] | None = None) -> list[Finding]:
    """A finding for every wanted name (None: all), in the order of the checks. A hanging check stays in a daemon
    thread, which does not prevent the program from exiting."""
    names = set(wanted) if wanted is not None else {name for check in checks for name in check.names}
    chosen = [check for check in checks if names & set(check.names)]
    results: queue.SimpleQueue[tuple[Check, Finding | None, str]] = queue.SimpleQueue()
    began = time.monotonic()
    for check in chosen:
        threading.Thread(target=_look, args=(check, results.put), name=check.names[0], daemon=True).start()
    found: dict[str, Finding] = {}
    waiting = list(chosen)
    while waiting:
        next_end = began + min(check.limit_s for check in waiting)
        try:
            check, finding, reason = results.get(timeout=max(0.0, next_end - time.monotonic()))
        except queue.Empty:
            now = time.monotonic()
            for late in [check for check in waiting if began + check.limit_s <= now]:
                waiting.remove(late)
                _fill(found, late, f"the check did not finish within {late.limit_s:g} s")
            continue
        if finding is not None:
            found.setdefault(finding.name, finding)
        elif check in waiting:
            waiting.remove(check)
            _fill(found, check, reason)
    return [found[name] for check in chosen for name in check.names if name in names]


def _look(check: Check, report: Callable[[tuple[Check, Finding | None, str]], None]) -> None:
    reason = "the check returned no result"
    try:
        for finding in check.look():
            report((check, finding, ""))
    except PipelineError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a failed check is a finding; the others continue
        reason = f"the check failed: {type(error).__name__}: {error}"
    report((check, None, reason))


def _fill(found: dict[str, Finding], check: Check, reason: str) -> None:
    for name in check.names:
        found.setdefault(name, Finding(name=name, status=Status.BROKEN, message=reason))


def one(name: str, look: Callable[..., Finding], *arguments: object, limit_s: float = 5.0) -> Check:
    """A check of one name; `look` is called with the name first."""
    return Check(names=(name,), look=partial(_only, look, name, *arguments), limit_s=limit_s)


def _only(look: Callable[..., Finding], *arguments: object) -> Iterable[Finding]:
    yield look(*arguments)


def lacking(names: Iterable[str], findings: Mapping[str, Finding]) -> list[str]:
    """The names whose findings prevent a role."""
    return [name for name in names if findings[name].status in (Status.MISSING, Status.BROKEN)]
