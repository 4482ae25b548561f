"""sglang servers that a program starts for itself: their commands, a supervisor process that keeps them up, and the
block in which they are there."""
