"""The tables: what assets own, the catalog made of it, and how people ask it."""
