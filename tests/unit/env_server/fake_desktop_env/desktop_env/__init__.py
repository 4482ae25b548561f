"""A stand-in for the parts of desktop-env that workers use; its task selects what it does wrong."""
