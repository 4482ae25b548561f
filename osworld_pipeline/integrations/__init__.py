"""Interfaces of other systems, over our desktops and our store."""
