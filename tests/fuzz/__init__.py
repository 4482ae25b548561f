"""Fuzz targets: every parser of foreign bytes, the inputs that broke one once, and a search for more."""
