"""OSWorld's desktop-env, in worker processes of the Python it is installed in; it is not imported here."""

from env_server.providers.desktop_env.driver import DesktopEnvDrivers
from env_server.providers.desktop_env.provider import DesktopEnvProvider

__all__ = ["DesktopEnvDrivers", "DesktopEnvProvider"]
