"""`env-server doctor`: tests what this host has and lacks for each kind of desktop. Each check has its own time limits
and removes what it created."""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from env_server.config import make_settings, overlay, read_config
from env_server.providers.base_image import image_digest
from env_server.providers.bounds import Bounds, DesktopLimits
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.kind import DesktopEnvSettings
from env_server.providers.gateway.client import ClientOptions
from env_server.providers.gateway.clients import load_client
from env_server.providers.gateway.settings import TOKEN_VARIABLE, GatewaySettings, gateway_token
from env_server.providers.gateway.trial import try_gateway
from env_server.providers.local.provider import LocalProvider
from env_server.providers.qemu.accelerator import boot_kernel, kvm_refusal
from env_server.providers.qemu.build import find_image
from env_server.providers.qemu.programs import check_builder, check_qemu, qemu_version
from env_server.providers.requirements import SYSTEM_PATH, check_programs
from env_server.server_settings import ServerSettings
from env_server.settings import SettingsError
from osworld_pipeline.domain.finding import Finding, Status
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.domain.shown_commands import ENV_SERVER, shell_line
from osworld_pipeline.errors import DependencyError, PipelineError
from osworld_pipeline.programs.answers import print_json
from osworld_pipeline.programs.arguments import ArgumentParser, add_json

DESKTOP_LIMIT_S = 20.0
BOOT_LIMIT_S = 6.0
"""A kernel under KVM reaches its first program within two seconds; with a broken KVM it hangs."""
DOCKER_LIMIT_S = 5.0
SCRATCH = "env-server-doctor-"
EXTRAS: Mapping[str, str] = {"chromium": "Chrome tasks", "ffmpeg": "recordings"}

Check = Callable[[], Finding]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every check ended with ok or with a warning, else 1."""
    defaults = ServerSettings()
    python = defaults.of(DesktopEnvSettings).python
    parser = ArgumentParser(prog="env-server doctor", description=__doc__)
    add_json(parser, "print one JSON object per line, as each check ends")
    parser.add_argument("--state-dir", type=Path, default=defaults.state_dir, help="images (default var/desktops)")
    parser.add_argument("--desktop-env-python", type=Path, default=python, metavar="PYTHON")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's file, for its [gateway] table")
    parser.add_argument("--gateway-url", metavar="URL", help="check this gateway too, and start a sandbox there")
    about_client = "a sandbox client's name, or module:attribute (default https)"
    parser.add_argument("--gateway-client", metavar="NAME", help=about_client)
    parser.add_argument("--gateway-ca-file", type=Path, metavar="FILE", help="certificates to trust, PEM")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="run only these checks; default: all")
    arguments = parser.parse_args(argv)
    try:
        gateway = _gateway_settings(arguments)
    except SettingsError as error:
        parser.error(str(error))
    checks = make_checks(arguments.state_dir.absolute(), arguments.desktop_env_python)
    wanted = arguments.checks or [*checks, *(["gateway"] if gateway.url else [])]
    checks["gateway"] = partial(check_gateway, gateway)
    unknown = sorted(set(wanted) - set(checks))
    if unknown:
        parser.error(f"no check named {unknown[0]}; known checks: {', '.join(checks)}")
    is_fine = True
    for finding in find_all({name: checks[name] for name in wanted}):
        is_fine &= finding.status in (Status.OK, Status.WARN)
        if arguments.as_json:
            print_json(finding.as_json(), on_one_line=True)
        else:
            print(_line(finding), flush=True)
    return 0 if is_fine else 1


def make_checks(state_dir: Path, desktop_env_python: Path) -> dict[str, Check]:
    return {
        "local-packages": check_local_packages,
        "local-desktop": partial(check_local_desktop, state_dir),
        "local-bounds": check_local_bounds,
        "local-extras": check_local_extras,
        "qemu-packages": check_qemu_packages,
        "qemu-image": partial(check_qemu_image, state_dir),
        "kvm": partial(check_kvm, state_dir),
        "desktop-env": partial(check_desktop_env, desktop_env_python),
        "docker": check_docker,
    }


def find_all(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Runs the checks in parallel; yields findings in the order in which the checks end."""
    with ThreadPoolExecutor(len(checks), thread_name_prefix="check") as pool:
        for done in as_completed([pool.submit(_find, name, check) for name, check in checks.items()]):
            yield done.result()


def _find(name: str, check: Check) -> Finding:
    try:
        return check()
    except DependencyError as error:
        return Finding.of_error(name, error)
    except PipelineError as error:
        return Finding.of_error(name, error, Status.BROKEN)
    except Exception as error:  # noqa: BLE001 - a check that fails is a finding, and the other checks continue
        text = f"the check failed: {type(error).__name__}: {error}"
        return Finding(name=name, status=Status.BROKEN, message=text)


def check_local_packages() -> Finding:
    check_programs()
    return Finding(
        name="local-packages", status=Status.OK, message="every Debian package of a local desktop is installed"
    )


def check_local_desktop(state_dir: Path) -> Finding:
    """Starts and removes one desktop, which tests namespaces, mounts, X and the guest agent together."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-") as scratch:
        check_programs()
        is_built = (state_dir / image_digest()[:24]).is_dir()
        provider = LocalProvider(images=state_dir if is_built else Path(scratch), screen_size=(640, 400))
        seconds = asyncio.run(_start_and_stop(provider))
    return Finding(
        name="local-desktop", status=Status.OK, message=f"a desktop started and showed its screen in {seconds:.1f} s"
    )


def _remove_leftovers(folder: Path) -> None:
    """Removes the folders of doctors that were killed."""
    for path in folder.glob(f"{SCRATCH}*"):
        owner = path.name.removeprefix(SCRATCH).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


async def _start_and_stop(provider: LocalProvider) -> float:
    began = time.monotonic()
    try:
        async with asyncio.timeout(DESKTOP_LIMIT_S):
            await provider.start("doctor")
        return time.monotonic() - began
    except TimeoutError as error:
        raise DependencyError(
            f"a local desktop was not up within {DESKTOP_LIMIT_S:g} s; try `{shell_line(ENV_SERVER, '--replicas', 1)}` "
            "when this machine is less busy, and read its log"
        ) from error
    finally:
        await provider.close()


def check_local_bounds() -> Finding:
    bounds = Bounds.open(DesktopLimits())
    bounds.close()
    if bounds.has_groups:
        return Finding(name="local-bounds", status=Status.OK, message=f"each desktop has a {bounds.description}")
    return Finding(
        name="local-bounds",
        status=Status.WARN,
        message=f"each desktop has {bounds.description}",
        remedy="start the env server as root, or as a systemd service with Delegate=yes",
    )


def check_local_extras() -> Finding:
    lacking = [program for program in EXTRAS if shutil.which(program, path=SYSTEM_PATH) is None]
    if not lacking:
        return Finding(name="local-extras", status=Status.OK, message="Chromium and ffmpeg are installed")
    names = " and ".join(f"{program} ({EXTRAS[program]})" for program in lacking)
    return Finding(
        name="local-extras",
        status=Status.WARN,
        message=f"local desktops lack {names}",
        remedy=how_to_set_up("extras"),
    )


def check_qemu_packages() -> Finding:
    check_qemu()
    check_builder()
    message = f"{qemu_version()} and the image build tools are installed"
    return Finding(name="qemu-packages", status=Status.OK, message=message)


def check_qemu_image(state_dir: Path) -> Finding:
    image = find_image(state_dir)
    if image is not None:
        return Finding(name="qemu-image", status=Status.OK, message=f"the Debian guest is built: {image.folder}")
    return Finding(
        name="qemu-image",
        status=Status.WARN,
        message=f"no Debian guest is built in {state_dir}: the first start builds it, which takes a minute",
        remedy=shell_line(ENV_SERVER, "build-image", "--state-dir", state_dir),
    )


def check_kvm(state_dir: Path) -> Finding:
    """Tested by booting a kernel under KVM."""
    slower = "virtual machines are emulated (TCG), about 20 times slower"
    refusal = kvm_refusal()
    if refusal is not None:
        return Finding.of_error("kvm", DependencyError(f"{slower}: {refusal}"), Status.WARN)
    folders = [path.parent for path in state_dir.glob("base-*/vmlinuz")]
    if not folders:
        return Finding(
            name="kvm",
            status=Status.WARN,
            message="/dev/kvm can be opened, but KVM is not tested: there is no guest yet to boot under it",
            remedy=" && ".join(
                shell_line(ENV_SERVER, *words, "--state-dir", state_dir)
                for words in (["build-image"], ["doctor", "kvm"])
            ),
        )
    check_qemu()
    reason = boot_kernel("kvm", folders[0] / "vmlinuz", folders[0] / "initrd.img", limit_s=BOOT_LIMIT_S)
    if reason is None:
        return Finding(name="kvm", status=Status.OK, message="a kernel booted under KVM")
    return Finding(
        name="kvm",
        status=Status.WARN,
        message=f"{slower}: {reason}",
        remedy="allow nested virtualisation on the host of this machine, or use a machine with KVM",
    )


def check_desktop_env(python: Path) -> Finding:
    install = DesktopEnvInstall.find(python)
    return Finding(
        name="desktop-env",
        status=Status.OK,
        message=f"desktop-env {install.version} with {len(install.metrics)} metrics in {install.python}",
    )


def check_docker() -> Finding:
    """Only DesktopEnv's provider of that name needs it."""
    lack = partial(Finding, name="docker", status=Status.WARN)
    remedy = "install Docker, or select another of DesktopEnv's providers with --desktop-env-provider"
    if shutil.which("docker") is None:
        return lack(message="there is no Docker, which DesktopEnv's default provider uses", remedy=remedy)
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOCKER_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return lack(message=f"Docker does not answer ({error})", remedy="start its daemon: systemctl start docker")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return lack(
            message=f"Docker's daemon cannot be used ({why})",
            remedy="start it (systemctl start docker), and add this user to the group docker",
        )
    return Finding(name="docker", status=Status.OK, message=f"Docker {done.stdout.strip()} answers")


def check_gateway(settings: GatewaySettings) -> Finding:
    """Starts and stops a sandbox there, which tests address, token, client and guest together."""
    if not settings.url:
        raise DependencyError("no gateway is configured; give --gateway-url https://HOST, or --config FILE")
    secret = gateway_token()
    options = ClientOptions(
        url=settings.url,
        token=secret.get_secret_value() if secret else "",
        ca_file=settings.ca_file,
        extra=settings.options,
    )
    try:
        client = load_client(settings.client, options)
    except ValueError as error:
        raise DependencyError(f"{error}; check --gateway-url and --gateway-ca-file") from error
    try:
        said = asyncio.run(try_gateway(client))
    except DependencyError as error:
        if secret is not None:
            raise
        raise DependencyError(f"{error}; no token is set: export {TOKEN_VARIABLE}") from error
    if secret is not None:
        return Finding(name="gateway", status=Status.OK, message=said)
    return Finding(
        name="gateway",
        status=Status.WARN,
        message=f"{said}, and required no token",
        remedy=f"start the gateway with a token, and export {TOKEN_VARIABLE}",
    )


def _gateway_settings(arguments: argparse.Namespace) -> GatewaySettings:
    """Raises SettingsError if a setting or the file is invalid."""
    held = read_config(arguments.config).get("gateway", {}) if arguments.config is not None else {}
    given = {"url": arguments.gateway_url, "client": arguments.gateway_client, "ca_file": arguments.gateway_ca_file}
    merged = overlay(held, {name: value for name, value in given.items() if value is not None})
    return make_settings({"gateway": merged}).of(GatewaySettings)


def _line(finding: Finding) -> str:
    way_out = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.status:<7}  {finding.name:<14}  {finding.message}{way_out}"


if __name__ == "__main__":
    sys.exit(main())
