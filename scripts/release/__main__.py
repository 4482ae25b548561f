"""`python -m scripts.release VERSION [--dry-run]`"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from scripts.release.errors import ReleaseError
from scripts.release.steps import CHECKS, Request, release

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("version", help="the new version, above the last release, e.g. 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="show what a release does and builds; change nothing")
    given = parser.parse_args()
    request = Request(root=ROOT, version=given.version, day=datetime.now(UTC).date(), is_dry_run=given.dry_run)
    try:
        release(request, CHECKS)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("release: interrupted; run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
