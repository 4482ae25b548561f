"""A stub of OSWorld's package for measurements of another server: our stub with its interface."""
