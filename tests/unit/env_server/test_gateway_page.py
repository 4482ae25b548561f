"""Everything that docs/gateway.md names exists: options, settings with their defaults, and a valid configuration."""

import argparse
import re
from pathlib import Path

from page_blocks import read_page

from env_server.config import make_settings, read_config
from env_server.gateway_server.faults import FaultShares
from env_server.gateway_server.main import make_parser
from env_server.options import add_server_options
from env_server.providers.gateway.settings import GatewaySettings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/gateway.md").read_text()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def commands(program: str) -> str:
    """Every indented line that runs `program`, with continued lines joined."""
    joined = PAGE.replace("\\\n", " ")
    return "\n".join(line for line in joined.splitlines() if line.startswith("    ") and f"{program} " in line)


def test_every_option_of_a_command_exists() -> None:
    server = argparse.ArgumentParser()
    add_server_options(server)
    of_doctor = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "env_server/doctor.py").read_text()))
    known = options_of(server) | options_of(make_parser()) | of_doctor
    lines = f"{commands('env-server')}\n{commands('osworld-gateway')}"
    named = set(re.findall(r"(?<=\s)--[a-z-]+", lines))
    assert {"--gateway-url", "--quota", "--faults", "--config"} <= named
    assert named - known == set()
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) - known - {"--help"} == set()


def test_every_setting_has_the_default_that_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \|", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == set(GatewaySettings.model_fields) - {"token"}
    for name, said in rows:
        value = getattr(GatewaySettings(), name)
        if isinstance(value, int | float):
            assert float(said) == value, name
        elif isinstance(value, str):
            assert said == f"`{value}`", name
        else:
            assert not value, name
            assert said in ("none", "the system's"), name


def test_the_configuration_on_the_page_is_valid_and_its_faults_can_be_read(tmp_path: Path) -> None:
    (text,) = [block.text for block in read_page(ROOT / "docs/gateway.md") if "[gateway]" in block.text]
    file = tmp_path / "sandboxes.toml"
    file.write_text(text)
    settings = make_settings(read_config(file), environment={})
    assert (settings.provider, settings.num_replicas, settings.screen) == ("gateway", 3, (512, 320))
    quota = int(re.findall(r"--quota (\d+) --retry-after-s", PAGE)[0])
    assert quota < settings.num_replicas, "else nobody would wait"
    (faults,) = {FaultShares.read(text) for text in re.findall(r"--faults (\S+) &", PAGE)}
    assert 0.0 < faults.fail + faults.lose + faults.busy < 0.5
