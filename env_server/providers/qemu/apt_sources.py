"""The sources of Debian packages for the build: those of this host's own apt, or else the defaults of mmdebstrap."""

import subprocess
from pathlib import Path

from env_server.providers.qemu.recipe import SUITE
from env_server.providers.requirements import SYSTEM_PATH

_SUITES = (SUITE, f"{SUITE}-updates", f"{SUITE}-security")
_QUERY_LIMIT_S = 30


def host_sources(etc_apt: Path = Path("/etc/apt")) -> tuple[str, ...]:
    """One-line entries for Debian's main component of the image's release. Empty if the host does not have that
    release: mmdebstrap then uses its default, Debian's own."""
    found: list[str] = []
    paths = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*.list"))]
    for path in paths:
        if path.is_file():
            found += _one_line_entries(path.read_text())
    for path in sorted((etc_apt / "sources.list.d").glob("*.sources")):
        found += _stanza_entries(path.read_text())
    unique = tuple(dict.fromkeys(found))
    return unique if any(entry.split()[2] == SUITE for entry in unique) else ()


def _one_line_entries(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] != ["deb"]:
            continue
        if words[1:2] and words[1].startswith("["):
            while not words[1].endswith("]"):
                words[1:3] = [" ".join(words[1:3])]
            del words[1]
        if len(words) >= 4 and "main" in words[3:]:
            found += _entries([words[1]], [words[2]])
    return found


def _stanza_entries(text: str) -> list[str]:
    found = []
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if not line.startswith("#") and ":" in line]
        fields = {key.strip().lower(): value.split() for key, _, value in (line.partition(":") for line in lines)}
        enabled = fields.get("enabled", ["yes"]) != ["no"]
        if enabled and "deb" in fields.get("types", []) and "main" in fields.get("components", []):
            found += _entries(fields.get("uris", []), fields.get("suites", []))
    return found


def _entries(uris: list[str], suites: list[str]) -> list[str]:
    return [f"deb {uri} {suite} main" for uri in uris for suite in suites if suite in _SUITES]


def host_apt_options() -> tuple[str, ...]:
    """The host's apt settings for downloads (proxies, certificates, validity checks, retries) as lines for an
    apt.conf."""
    try:
        done = subprocess.run(
            ["apt-config", "dump", "--no-empty", "Acquire"],
            capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=False, env={"PATH": SYSTEM_PATH},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
    return tuple(line for line in done.stdout.splitlines() if line.startswith(wanted))
