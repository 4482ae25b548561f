"""`env-server doctor`: each check is one finding, whatever happens in it."""

import json
import os
from pathlib import Path

import pytest

from env_server import doctor
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.errors import DependencyError, ReplicaError


def fine() -> Finding:
    return Finding(name="fine", status=Status.OK, message="it is there")


def lacking() -> Finding:
    raise DependencyError("a desktop lacks xvfb; run `scripts/setup debian`")


def dead() -> Finding:
    raise ReplicaError("the desktop did not come up")


def buggy() -> Finding:
    raise KeyError("x")


def test_a_lack_is_missing_and_a_check_that_fails_is_broken() -> None:
    found = {each.name: each for each in doctor.find_all({"lacking": lacking, "dead": dead, "buggy": buggy})}
    assert found["lacking"].status == Status.MISSING
    assert found["lacking"].remedy == "run `scripts/setup debian`"
    assert (found["dead"].status, found["dead"].message) == (Status.BROKEN, "the desktop did not come up")
    assert found["buggy"].message == "the check failed: KeyError: 'x'"


def test_a_line_of_json_for_each_check_and_the_status_says_whether_all_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "make_checks", lambda *places: {"fine": fine, "lacking": lacking})
    assert doctor.main(["--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["name"]: line["status"] for line in lines} == {"fine": "ok", "lacking": "missing"}
    assert doctor.main(["fine"]) == 0
    assert capsys.readouterr().out == "ok       fine            it is there\n"


def test_an_unknown_check_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["teapot"])
    assert end.value.code == 2
    assert "no check named teapot; there are: local-packages" in capsys.readouterr().err


def test_kvm_is_not_believed_before_a_guest_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kvm_refusal", lambda: None)
    assert "proves nothing" in doctor.check_kvm(tmp_path).message
    (tmp_path / "base-0" / "vmlinuz").parent.mkdir()
    (tmp_path / "base-0" / "vmlinuz").touch()
    monkeypatch.setattr(doctor, "check_qemu", lambda: None)
    monkeypatch.setattr(doctor, "boot_kernel", lambda *words, limit_s: "a kernel did not boot")
    assert doctor.check_kvm(tmp_path).status == Status.WARN
    monkeypatch.setattr(doctor, "boot_kernel", lambda *words, limit_s: None)
    assert doctor.check_kvm(tmp_path).status == Status.OK


def test_what_a_killed_doctor_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    dead, alive = tmp_path / "env-server-doctor-999999999-x", tmp_path / f"env-server-doctor-{os.getpid()}-x"
    for folder in (dead, alive):
        (folder / "image").mkdir(parents=True)
    doctor._remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]


def test_without_kvm_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kvm_refusal", lambda: "/dev/kvm may not be opened; add this user to the group kvm")
    found = doctor.check_kvm(tmp_path)
    assert (found.status, found.remedy) == (Status.WARN, "add this user to the group kvm")
