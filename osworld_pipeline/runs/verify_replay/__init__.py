"""Playback of demonstrations on real desktops."""
