"""The number of the protocol between client and env server: /v1, and the fields added to Slime's endpoints."""

PROTOCOL = 1
"""Raised by an incompatible change. Client and server of different numbers are not used together."""
UNREPORTED = 1
"""The protocol of servers that report no number: 0.1.0 is the only such version."""
