"""The `desktop_env` provider: OSWorld's DesktopEnv with its own VM providers (docker, vmware, aws, ...), each desktop
in a worker process of the Python where it is installed."""

import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from env_server.guest_client import GuestClient
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.workers import Answer, Launcher, Worker
from osworld_pipeline.errors import PipelineError, ReplicaError

START_LIMIT_S = 540.0
RESET_LIMIT_S = 300.0
"""A VM of OSWorld's boots again for a reset, unless its provider has snapshots."""
PROVIDERS = ("docker", "vmware", "virtualbox", "aws", "azure", "aliyun", "volcengine", "local")
"""DesktopEnv's own, and `local`: the desktops of this project under DesktopEnv's loop."""
_ROOT = Path(__file__).resolve().parents[3]
_LOCAL_PLUGIN = "worker.local_desktops:create"
_LOCAL_HELPER = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
    "from env_server.providers.desktop_env.local_desktop import main; main()"
)


class DesktopEnvProvider:
    """`folder` is the working folder of DesktopEnv's processes; VM images that it downloads are stored there, too.
    `plugin` is a function (region, options) that returns a VM manager and a provider with desktop-env's interfaces, as
    module:function or file.py:function."""

    name = "desktop_env"
    reset_timeout_s = RESET_LIMIT_S

    def __init__(
        self,
        *,
        python: Path,
        screen_size: tuple[int, int] = (1920, 1080),
        provider_name: str = "docker",
        path_to_vm: str | None = None,
        region: str | None = None,
        snapshot_name: str = "init_state",
        os_type: str = "Ubuntu",
        client_password: str = "password",  # noqa: S107 - that of the published images
        headless: bool = True,
        plugin: str | None = None,
        plugin_options: Mapping[str, Any] | None = None,
        folder: Path = Path("var/desktops/desktop-env"),
        install: DesktopEnvInstall | None = None,
    ) -> None:
        if provider_name not in PROVIDERS:
            raise ValueError(f"desktop-env has no provider {provider_name!r}; known: {', '.join(PROVIDERS)}")
        self.install = install or DesktopEnvInstall.find(python)
        self._options = {
            "provider_name": provider_name,
            "path_to_vm": path_to_vm,
            "region": region,
            "snapshot_name": snapshot_name,
            "os_type": os_type,
            "client_password": client_password,
            "headless": headless,
            "screen_size": list(screen_size),
            "action_space": "pyautogui",
            "require_a11y_tree": False,
        }
        if provider_name == "local" and plugin is None:
            plugin = _LOCAL_PLUGIN
            size = f"{screen_size[0]}x{screen_size[1]}"
            command = [sys.executable, "-c", _LOCAL_HELPER, "--images", str(folder.absolute().parent), "--size", size]
            plugin_options = {"command": command}
        self._plugin, self._plugin_options = plugin, dict(plugin_options or {})
        self._launcher = Launcher(self.install, folder=folder)

    @property
    def details(self) -> str:
        return f"DesktopEnv's {self._options['provider_name']}"

    @property
    def image_digest(self) -> str:
        """Digest of what identifies the image: DesktopEnv's options except the password, the plug-in's name,
        DesktopEnv's release, and the VM file's size and modification time."""
        options = {key: value for key, value in self._options.items() if key != "client_password"}
        path = self._options["path_to_vm"]
        if path is not None and Path(str(path)).is_file():
            status = Path(str(path)).stat()
            options["vm"] = [status.st_size, status.st_mtime_ns]
        return sha256(json.dumps([options, self._plugin, self.install.name], sort_keys=True).encode()).hexdigest()

    async def start(self, replica_id: str) -> "DesktopEnvDesktop":
        worker = await self._launcher.start_worker(replica_id)
        try:
            address = await worker.call(
                "start",
                limit_s=START_LIMIT_S,
                options=self._options,
                plugin=self._plugin,
                plugin_options=self._plugin_options,
            )
        except BaseException as error:
            await self._launcher.stop_worker(worker)
            if isinstance(error, PipelineError):
                raise ReplicaError(f"the desktop {replica_id} did not start: {error}") from error
            raise
        return DesktopEnvDesktop(self._launcher, worker, address)

    async def close(self) -> None:
        await self._launcher.close()


class DesktopEnvDesktop:
    def __init__(self, launcher: Launcher, worker: Worker, address: Answer) -> None:
        self.worker = worker
        self._launcher = launcher
        self._guest = self._client(address)

    @property
    def guest(self) -> GuestClient:
        return self._guest

    async def reset(self) -> None:
        await self.moved(await self.worker.call("refresh", limit_s=RESET_LIMIT_S))

    async def moved(self, address: Answer) -> None:
        """Updates the guest's address: a restarted VM may have another one."""
        new = self._client(address)
        if new.address == self._guest.address:
            await new.close()
            return
        old, self._guest = self._guest, new
        await old.close()

    def is_alive(self) -> bool:
        return self.worker.is_alive()

    async def stop(self) -> None:
        try:
            await self._launcher.stop_worker(self.worker)
        finally:
            await self._guest.close()

    def _client(self, address: Answer) -> GuestClient:
        root = f"http://{address.fields['host']}:{address.fields['port']}"
        return GuestClient.over_tcp(root, name=self.worker.name)
