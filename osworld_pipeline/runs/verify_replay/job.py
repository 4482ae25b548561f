"""The job of the program that verifies demonstrations."""

from osworld_pipeline.runs.job import DesktopJob


class VerificationJob(DesktopJob):
    key: str = ""
    """Digest of everything that determines the verdicts, if known."""
