"""What the guest agent of a sandbox imports at the start of every desktop."""

import subprocess
from pathlib import Path

import pytest

from env_server.providers.requirements import SYSTEM_PYTHON

ROOT = Path(__file__).resolve().parents[3]
SLOW = ("argparse", "dataclasses", "inspect", "urllib.request", "xml.sax")
IMPORTS = f"""
import gc, sys
gc.disable()
sys.path.insert(0, {str(ROOT)!r})
import env_server.guest.init as init
import site
sys.path += site.getsitepackages()
init.import_agent()
print(*[name for name in {SLOW!r} if name in sys.modules], sys.modules["ssl"], gc.isenabled())
"""


@pytest.mark.desktop
def test_the_agent_imports_nothing_slow_that_it_does_not_need() -> None:
    done = subprocess.run([SYSTEM_PYTHON, "-ISc", IMPORTS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["None", "True"], done.stdout + done.stderr
