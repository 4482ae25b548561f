"""Searches every parser, or the named ones, for inputs that break it: `make fuzz SECONDS=600`.

Prints one line for each parser: how many inputs were tried, and the finding, if there is one. Exits with 1 if there is
a finding. Add a finding's input to tests/fuzz/cases/PARSER once the finding is fixed."""

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.parsers import PARSERS

NUM_INPUTS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
FINDING = re.compile(r"Test unit written to (\S+)")
STARTING_S = 120
"""A search may take so long beyond its seconds: it imports, and ends an input that it has begun."""


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    options.add_argument("names", nargs="*", choices=[[], *PARSERS], help="parsers; all where none is named")
    options.add_argument("--seconds", type=int, default=60, help="of search for each parser")
    options.add_argument("--jobs", type=int, default=2, help="searches at once")
    options.add_argument("--folder", type=Path, default=Path("var/fuzz"), help="for corpus, logs and findings")
    chosen = options.parse_args()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        searches = pool.map(lambda name: search(name, chosen.seconds, chosen.folder / name), chosen.names or PARSERS)
        has_findings = False
        for line, is_finding in searches:
            print(line, flush=True)
            has_findings |= is_finding
    return int(has_findings)


def search(name: str, seconds: int, folder: Path) -> tuple[str, bool]:
    """The line to print, and whether there is a finding."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    command = [sys.executable, "-m", "fuzz.search", name, str(seconds), str(folder)]
    with log.open("wb") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=seconds + STARTING_S).returncode
        except subprocess.TimeoutExpired:
            return f"{name:<24} did not end within {seconds + STARTING_S} s; see {log}", True
    text = log.read_text(errors="replace")
    inputs, finding = NUM_INPUTS.search(text), FINDING.search(text)
    line = f"{name:<24} {inputs[1] if inputs else '?':>10} inputs in {seconds} s"
    if finding is None and status == 0:
        return line, False
    return f"{line}: {finding[1] if finding else f'ended with {status}'}; see {log}", True


if __name__ == "__main__":
    sys.exit(main())
