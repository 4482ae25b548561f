"""Watches desktop-env's own HTTP calls to a guest. If the guest is gone, its controllers only log that and continue
with None, which a metric then scores 0; here it is detected and reported as a fault."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import requests

from .fault import Fault

PROBE_LIMIT_S = 10.0


class GuestWatch:
    """Records every call to the guest at `root` that was not answered, not even after a retry."""

    def __init__(self) -> None:
        self.root = "http://nowhere"
        self.unanswered: dict[tuple[str, str], str] = {}
        send = requests.Session.send

        def watched(session: Any, request: Any, **options: Any) -> Any:
            key = (str(request.method), str(request.url))
            try:
                answer = send(session, request, **options)
            except requests.RequestException as error:
                if key[1].startswith(f"{self.root}/"):
                    self.unanswered[key] = type(error).__name__
                raise
            self.unanswered.pop(key, None)
            return answer

        requests.Session.send = watched  # pyright: ignore[reportAttributeAccessIssue]

    def is_there(self) -> bool:
        """Whether the guest answers, including with an error."""
        try:
            with urllib.request.urlopen(f"{self.root}/platform", timeout=PROBE_LIMIT_S):  # noqa: S310 - http, ours
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def check(self) -> None:
        """Raises Fault if a call since the last clear was never answered."""
        if self.unanswered:
            (method, url), reason = next(iter(self.unanswered.items()))
            raise Fault("replica", f"the guest did not answer {method} {url.removeprefix(self.root)} ({reason})")

    def score(self, evaluate: Callable[[], Any]) -> float:
        """Runs OSWorld's grading. Raises Fault `evaluator` if it crashed, `replica` if the guest was gone, `excess` if
        memory did not suffice."""
        self.unanswered.clear()
        try:
            score = float(evaluate())
        except MemoryError as error:
            raise Fault("excess", "the grading ran out of memory") from error
        except Exception as error:
            if not self.is_there():
                raise Fault("replica", "the guest was gone when its task was graded") from error
            traceback.print_exc()
            raise Fault("evaluator", f"{type(error).__name__}: {error}"[:1000]) from error
        self.check()
        return score
