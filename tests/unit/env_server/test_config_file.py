"""The configuration file, and the command line that overrides it."""

import argparse
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import env_server
from env_server.config import make_settings
from env_server.describe import describe
from env_server.options import add_server_options, settings_of
from env_server.providers.gateway.settings import GatewaySettings
from env_server.providers.kinds import provider_kinds
from env_server.providers.qemu.kind import QemuSettings
from env_server.server_settings import ServerSettings
from env_server.settings import DEFAULT_DOWNLOAD_HOSTS, SettingsError
from env_server.table import Option, Table, choices_of, meaning

EXAMPLE = Path(env_server.__file__).with_name("example.toml")


def settings(*words: str, **forced: Any) -> ServerSettings:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return settings_of(parser.parse_args(words), **forced)


def written(folder: Path, text: str) -> str:
    path = folder / "server.toml"
    path.write_text(text)
    return str(path)


def test_example_holds_the_defaults() -> None:
    assert settings("--config", str(EXAMPLE)) == ServerSettings.from_environment({})


TABLES = ("limits", "osgym", *provider_kinds())


def table(name: str) -> type[Table]:
    """The class of a table of the file; that of the top level for an empty name."""
    kind: Any = ServerSettings.model_fields[name].annotation if name else ServerSettings
    assert issubclass(kind, Table)
    return kind


def test_example_is_the_generated_one_and_every_setting_has_a_meaning() -> None:
    assert EXAMPLE.read_text() == describe(), "run: python -m env_server.describe > env_server/example.toml"
    for name in ("", *TABLES):
        unexplained = {key for key, field in table(name).model_fields.items() if not meaning(field)}
        assert unexplained <= set() if name else set(TABLES), name


def test_commented_out_examples_are_valid(tmp_path: Path) -> None:
    shown = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", EXAMPLE.read_text())
    got = settings("--config", written(tmp_path, shown))
    assert (got.of(QemuSettings).memory_mb, got.of(GatewaySettings).url) == (1024, "https://sandboxes.example.org")
    assert got.limits.upload_root == Path("/srv/tasks")


@pytest.mark.parametrize("name", ["", *TABLES])
def test_every_option_sets_its_field(name: str) -> None:
    values = {int: "1000", float: "3.5", str: "localhost", Path: "some/path"}
    for key, field in table(name).model_fields.items():
        for option in (one for one in field.metadata if isinstance(one, Option)):
            flag = option.flag or f"--{key.replace('_', '-')}"
            kinds = {one for one in (field.annotation, *get_args(field.annotation)) if one in values}
            if choices_of(field):
                words = [flag, choices_of(field)[-1]]
            elif field.annotation is bool:
                words = [flag]
            elif field.examples:
                words = [flag, str(field.examples[0])]
            else:
                words = [flag, "8101" if option.parse else values[kinds.pop()]]
            made = settings(*words, osgym_allowed_ips=("127.0.0.1",))
            assert getattr(getattr(made, name) if name else made, key) != field.default, flag


def test_command_line_overrides_the_file_key_by_key(tmp_path: Path) -> None:
    file = written(tmp_path, 'num_replicas = 3\nport = 9000\n[qemu]\naccelerator = "tcg"\nmemory_mb = 512\n')
    got = settings("--config", file, "--port", "0", "--accelerator", "kvm", "--screen-size", "640x480")
    assert (got.num_replicas, got.port, got.screen) == (3, 0, (640, 480))
    assert (got.of(QemuSettings).accelerator, got.of(QemuSettings).memory_mb) == ("kvm", 512)
    assert settings("--config", file, num_replicas=7).num_replicas == 7


def test_download_hosts_of_the_command_line_are_added_to_the_others(tmp_path: Path) -> None:
    assert settings("--download-host", "a.test").limits.download_hosts == (*DEFAULT_DOWNLOAD_HOSTS, "a.test")
    file = written(tmp_path, '[limits]\ndownload_hosts = ["b.test"]\n')
    got = settings("--config", file, "--download-host", "a.test").limits
    assert got.download_hosts == ("b.test", "a.test")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("replicas = 2", "unknown key 'replicas'"),
        ("[limits]\nsleep = 2", "unknown key 'limits.sleep'"),
        ("limits = 2", r"'limits' as a value; it must be a table: \[limits\]"),
        ("num_replicas = 0", "num_replicas: .* greater than or equal to 1"),
        ("[qemu]\naccelerator = 'magic'", "qemu.accelerator"),
        ("token = 'secret'", "set it in the environment: ENV_SERVER_TOKEN"),
        ("osgym_allowed_ips = ['10.0.0.1']", "set it in the environment: OSGYM_ALLOWED_IPS"),
        ("port = ", "is not valid TOML"),
    ],
)
def test_wrong_file_is_refused_with_the_name_of_the_wrong_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        settings("--config", written(tmp_path, text))
    assert "secret" not in str(caught.value)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the configuration .*check --config"):
        settings("--config", str(tmp_path / "none.toml"))


def test_every_provider_is_a_package_with_its_own_settings_and_options() -> None:
    kinds = provider_kinds()
    assert next(iter(kinds)) == "local", "the default"
    assert {"desktop_env", "gateway", "qemu"} <= set(kinds)
    for name, kind in kinds.items():
        assert type(make_settings({"provider": name}, {}).of(kind.settings)) is kind.settings


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=f"no provider 'docker'; there are: {', '.join(provider_kinds())}"):
        make_settings({"provider": "docker"}, {})


def test_a_secret_comes_from_the_environment_alone() -> None:
    made = make_settings({"qemu": {"memory_mb": 512}}, {"WINDOWS_ADMIN_PASSWORD": "p", "OSWORLD_SANDBOX_TOKEN": " "})
    own = made.of(QemuSettings)
    assert own.password is not None
    assert (own.password.get_secret_value(), own.memory_mb) == ("p", 512)
    assert made.of(GatewaySettings).token is None
