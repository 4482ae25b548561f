"""OSWorld's desktop-env, in worker processes of the Python it is installed in; it is not imported here."""
