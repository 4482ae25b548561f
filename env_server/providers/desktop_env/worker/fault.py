"""What a worker answers instead of a result."""


class Fault(Exception):
    """The error answer: its kind (`setup`, `replica`, `evaluator`, `excess`), and a message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
