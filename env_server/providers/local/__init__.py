"""Desktops on this machine: an X server and its programs in a bubblewrap sandbox."""
