"""The tables: those owned by assets, the catalog built from them, and queries."""
