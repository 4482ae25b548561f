"""sglang servers that a program starts for itself: their commands, a supervisor process that restarts them, and a
context manager for their lifetime."""
