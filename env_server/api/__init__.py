"""The surfaces of the env server over HTTP; each speaks one client's language over the same episodes."""
