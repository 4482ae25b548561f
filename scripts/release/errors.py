class ReleaseError(Exception):
    """One sentence: what is wrong, and what to do."""
