"""`env-server doctor`: each check gives one finding, even if the check fails."""

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest
from gateway_doubles import ScriptedClient

from env_server import doctor
from env_server.providers.gateway.client import ClientOptions, SandboxBusyError, SandboxFailedError, SandboxRefusedError
from env_server.providers.gateway.settings import GatewaySettings
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


def test_a_dependency_error_is_missing_and_a_check_that_fails_is_broken() -> None:
    found = {each.name: each for each in doctor.find_all({"lacking": lacking, "dead": dead, "buggy": buggy})}
    assert found["lacking"].status == Status.MISSING
    assert found["lacking"].remedy == "run `scripts/setup debian`"
    assert (found["dead"].status, found["dead"].message) == (Status.BROKEN, "the desktop did not come up")
    assert found["buggy"].message == "the check failed: KeyError: 'x'"


def test_each_check_prints_one_line_of_json_and_the_exit_status_says_whether_all_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "make_checks", lambda *places: {"fine": fine, "lacking": lacking})
    assert doctor.main(["--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["name"]: line["status"] for line in lines} == {"fine": "ok", "lacking": "missing"}
    assert doctor.main(["fine"]) == 0
    assert capsys.readouterr().out == "ok       fine            it is there\n"


def test_the_error_for_an_unknown_check_lists_the_known_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["teapot"])
    assert end.value.code == 2
    assert "no check named teapot; known checks: local-packages" in capsys.readouterr().err


def test_kvm_is_reported_as_working_only_after_a_guest_has_booted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "kvm_refusal", lambda: None)
    assert "KVM is not tested" in doctor.check_kvm(tmp_path).message
    (tmp_path / "base-0" / "vmlinuz").parent.mkdir()
    (tmp_path / "base-0" / "vmlinuz").touch()
    monkeypatch.setattr(doctor, "check_qemu", lambda: None)
    monkeypatch.setattr(doctor, "boot_kernel", lambda *words, limit_s: "a kernel did not boot")
    assert doctor.check_kvm(tmp_path).status == Status.WARN
    monkeypatch.setattr(doctor, "boot_kernel", lambda *words, limit_s: None)
    assert doctor.check_kvm(tmp_path).status == Status.OK


def test_folders_of_a_killed_doctor_are_removed_and_those_of_a_running_one_are_not(tmp_path: Path) -> None:
    dead, alive = tmp_path / "env-server-doctor-999999999-x", tmp_path / f"env-server-doctor-{os.getpid()}-x"
    for folder in (dead, alive):
        (folder / "image").mkdir(parents=True)
    doctor._remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]


def test_without_kvm_the_remedy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kvm_refusal", lambda: "/dev/kvm cannot be opened; add this user to the group kvm")
    found = doctor.check_kvm(tmp_path)
    assert (found.status, found.remedy) == (Status.WARN, "add this user to the group kvm")


GATEWAY = GatewaySettings(url="http://127.0.0.1:9", client="test_env_server_doctor:Fine")


class Fine(ScriptedClient):
    """A client that is created from its options like any other."""

    made: ClassVar[list["Fine"]] = []

    def __init__(self, options: ClientOptions) -> None:
        super().__init__()
        self.options = options
        self.made.append(self)


class Full(Fine):
    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self.errors = [SandboxBusyError("all 2 sandboxes of the quota are taken", retry_after_s=5)]


class Refusing(Fine):
    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self.errors = [SandboxRefusedError("the gateway answered 401; check --gateway-url and the token")]


class Away(Fine):
    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self.errors = [SandboxFailedError("the gateway cannot be reached", may_have_happened=False)]


class Booting(Fine):
    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self.errors = [None, SandboxFailedError("booting", may_have_happened=False)]


def look_at(client: str, **settings: object) -> Finding:
    chosen = GATEWAY.model_copy(update={"client": f"test_env_server_doctor:{client}", **settings})
    (finding,) = doctor.find_all({"gateway": lambda: doctor.check_gateway(chosen)})
    return finding


def test_a_gateway_is_ok_if_one_of_its_guests_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSWORLD_SANDBOX_TOKEN", "secret")
    for client in ("Fine", "Booting"):
        found = look_at(client, options={"region": "here"})
        assert (found.name, found.status) == ("gateway", Status.OK)
        assert "its guest answered" in found.message
        made = Fine.made[-1]
        assert made.calls[0] == "start"
        assert made.calls[-2:] == ["stop", "close"], "nothing is left there"
        assert (made.options.token, made.options.extra) == ("secret", {"region": "here"})
        assert "secret" not in found.message


@pytest.mark.parametrize(
    ("client", "status", "words"),
    [
        ("Full", Status.OK, "has no free sandbox now"),
        ("Refusing", Status.MISSING, "the gateway answered 401"),
        ("Away", Status.BROKEN, "cannot be reached"),
        ("Nobody", Status.MISSING, "cannot be created"),
    ],
)
def test_what_a_gateway_lacks_is_reported(
    client: str, status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSWORLD_SANDBOX_TOKEN", "secret")
    found = look_at(client)
    assert found.status == status
    assert words in found.message


def test_a_missing_token_is_reported_whether_or_not_the_gateway_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSWORLD_SANDBOX_TOKEN", raising=False)
    assert look_at("Refusing").remedy == "no token is set: export OSWORLD_SANDBOX_TOKEN"
    found = look_at("Fine")
    assert (found.status, "required no token" in found.message) == (Status.WARN, True)


def test_an_address_that_would_expose_the_token_is_reported_without_a_request() -> None:
    with pytest.raises(DependencyError, match=r"to gateway\.test unencrypted; use https://; check --gateway-url"):
        doctor.check_gateway(GatewaySettings(url="http://gateway.test"))
    with pytest.raises(DependencyError, match="no gateway is configured; give --gateway-url"):
        doctor.check_gateway(GatewaySettings())


def test_a_gateway_is_checked_if_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "make_checks", lambda *places: {"fine": fine})
    monkeypatch.setattr(doctor, "check_gateway", lambda settings: Finding(
        name="gateway", status=Status.OK, message=f"{settings.url} {settings.client} {settings.start_timeout_s:g}"
    ))  # fmt: skip
    assert doctor.main([]) == 0
    assert "gateway" not in capsys.readouterr().out
    config = tmp_path / "server.toml"
    config.write_text('[gateway]\nurl = "https://one.test"\nclient = "vendor"\nstart_timeout_s = 7\n')
    assert doctor.main(["--config", str(config), "gateway"]) == 0
    assert "https://one.test vendor 7" in capsys.readouterr().out
    assert doctor.main(["--config", str(config), "--gateway-url", "https://two.test", "--json"]) == 0
    assert "https://two.test vendor 7" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        doctor.main(["--config", str(tmp_path / "none.toml")])
    assert "cannot read the configuration" in capsys.readouterr().err
