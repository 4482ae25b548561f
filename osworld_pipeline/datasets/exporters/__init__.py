"""Exports of the store for other programs: each is a folder, written whole or not at all, in bounded memory."""
