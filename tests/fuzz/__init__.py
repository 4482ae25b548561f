"""Fuzz targets: every parser of foreign bytes, the inputs that once broke a parser, and a search for more of them."""
