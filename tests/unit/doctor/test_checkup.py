"""Checks run in parallel, and every name gets a finding even if a check hangs or crashes."""

import time
from collections.abc import Iterator

from osworld_pipeline.doctor.checkup import Check, lacking, one, run_checks
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.errors import DependencyError


def fine(name: str) -> Finding:
    return Finding(name=name, status=Status.OK, message="it is there")


def hang(name: str) -> Finding:
    time.sleep(30)
    return fine(name)


def crash(name: str) -> Finding:
    raise ZeroDivisionError("a bug")


def refuse(name: str) -> Finding:
    raise DependencyError("nobody answers; start it")


def test_a_check_that_hangs_is_a_finding_and_does_not_delay_other_checks() -> None:
    began = time.monotonic()
    found = run_checks([one("slow", hang, limit_s=0.2), one("quick", fine)])
    assert time.monotonic() - began < 5.0
    assert [(finding.name, finding.status) for finding in found] == [("slow", Status.BROKEN), ("quick", Status.OK)]
    assert found[0].message == "the check did not finish within 0.2 s"


def test_a_check_that_crashes_is_a_finding_with_its_reason() -> None:
    crashed, refused = run_checks([one("crashes", crash), one("refuses", refuse)])
    assert crashed.status == refused.status == Status.BROKEN
    assert crashed.message == "the check failed: ZeroDivisionError: a bug"
    assert refused.message == "nobody answers; start it"


def test_findings_made_before_the_time_limit_are_kept() -> None:
    def look() -> Iterator[Finding]:
        yield fine("first")
        time.sleep(30)
        yield fine("second")

    first, second = run_checks([Check(names=("first", "second"), look=look, limit_s=0.3)])
    assert (first.status, second.status) == (Status.OK, Status.BROKEN)


def test_a_name_for_which_its_check_returns_no_result_is_a_finding_too() -> None:
    (found,) = run_checks([Check(names=("forgotten",), look=lambda: iter(()), limit_s=5.0)])
    assert (found.status, found.message) == (Status.BROKEN, "the check returned no result")


def test_only_checks_that_are_wanted_are_run() -> None:
    found = run_checks([one("slow", hang, limit_s=20.0), one("quick", fine)], wanted=["quick"])
    assert [finding.name for finding in found] == ["quick"]


def test_a_warning_does_not_make_a_role_unready() -> None:
    statuses = {"a": Status.OK, "b": Status.WARN, "c": Status.MISSING, "d": Status.BROKEN}
    findings = {name: Finding(name=name, status=status, message="") for name, status in statuses.items()}
    assert lacking(("a", "b", "c", "d"), findings) == ["c", "d"]


def test_a_finding_round_trips_through_json_and_an_error_is_split_into_message_and_remedy() -> None:
    finding = Finding.of_error("x", DependencyError("a desktop lacks xvfb; run `scripts/setup debian`"))
    assert (finding.message, finding.remedy) == ("a desktop lacks xvfb", "run `scripts/setup debian`")
    assert Finding.from_json(finding.as_json()) == finding
    assert Finding.of_error("x", DependencyError("it is so")).message == "it is so"
