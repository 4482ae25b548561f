"""The domain types: frozen values without I/O."""
