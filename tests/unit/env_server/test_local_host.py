"""What a host must have, how a missing part is reported, and what goes into an image."""

import threading
from pathlib import Path

import pytest

from env_server.providers.base_image import TEXT_FILES, ensure_image
from env_server.providers.local.provider import LocalProvider
from env_server.providers.requirements import explain_namespaces
from osworld_pipeline.errors import DependencyError


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ],
)
def test_the_error_for_a_forbidden_namespace_names_the_setting_and_the_remedy(
    tmp_path: Path, name: str, value: str, remedy: str
) -> None:
    (tmp_path / "sys" / name).parent.mkdir(parents=True)
    (tmp_path / "sys" / name).write_text(f"{value}\n")
    message = str(explain_namespaces("bwrap: No permissions", proc=tmp_path))
    assert f"{name.replace('/', '.')}={value}" in message
    assert f"sudo sysctl -w {remedy}" in message


def test_the_error_for_an_unknown_refusal_repeats_bubblewraps_message(tmp_path: Path) -> None:
    write_status(tmp_path, uid=1000, capabilities="0")
    message = str(explain_namespaces("bwrap: setting up uid map", proc=tmp_path))
    assert "bwrap: setting up uid map" in message
    assert "seccomp=unconfined" in message


def test_the_error_for_root_of_a_container_that_may_not_mount_names_the_capability(tmp_path: Path) -> None:
    write_status(tmp_path, uid=0, capabilities="00000000800405fb")
    assert "--cap-add SYS_ADMIN" in str(explain_namespaces("unshare: unshare failed", proc=tmp_path))
    write_status(tmp_path, uid=0, capabilities="000001ffffffffff")
    assert "--cap-add" not in str(explain_namespaces("unshare: unshare failed", proc=tmp_path))


def write_status(proc: Path, *, uid: int, capabilities: str) -> None:
    (proc / "self").mkdir(exist_ok=True)
    (proc / "self/status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n")


def test_a_screen_too_small_to_hold_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="100x100 is too small"):
        LocalProvider(images=tmp_path, screen_size=(100, 100))


def test_the_guests_accounts_hold_no_password_and_no_user_of_the_host() -> None:
    names = [line.partition(":")[0] for line in TEXT_FILES["etc/passwd"].splitlines()]
    assert names == ["root", "user", "messagebus", "nobody"]
    assert all(line.split(":")[1] == "*" for line in TEXT_FILES["etc/shadow"].splitlines())


@pytest.mark.desktop
def test_parallel_builders_make_one_image(tmp_path: Path) -> None:
    found: list[Path] = []
    builders = [threading.Thread(target=lambda: found.append(ensure_image(tmp_path, "a" * 64))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert found == [tmp_path / ("a" * 24)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["a" * 24]
    assert (found[0] / "home/user/Desktop").is_dir()
    assert not (found[0] / "usr").exists()


@pytest.mark.desktop
def test_a_folder_that_cannot_be_made_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DependencyError, match="cannot make the desktop image below"):
        ensure_image(tmp_path / "file" / "images", "b" * 64)
