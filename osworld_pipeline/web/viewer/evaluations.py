"""Names of evaluations on the pages, computed once for each state of the store."""

import threading
from collections.abc import Mapping
from typing import Any

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.web.evaluation_names import (
    PLAYED,
    EvaluationName,
    name_evaluations,
    own_suite_files,
    own_suites,
    recorded_suites,
)
from osworld_pipeline.web.viewer.index import EpisodeIndex, Reader


class Evaluations:
    """Thread-safe."""

    def __init__(self, state: StateDir, index: EpisodeIndex) -> None:
        self._state, self._index = state, index
        self._lock = threading.Lock()
        self._made_from: Any = None
        self._names: Mapping[str, EvaluationName] = {}

    def names(self, reader: Reader) -> Mapping[str, EvaluationName]:
        """The names by evaluation key, in the order of suite and time."""
        recorded = recorded_suites(self._state)
        made_from = (self._index.generation, own_suite_files(self._state), recorded)
        with self._lock:
            if made_from != self._made_from:
                rows = reader.dicts(PLAYED.format(source="facts"))
                self._names = name_evaluations(rows, suites=own_suites(self._state), recorded=recorded)
                self._made_from = made_from
            return self._names
