"""Exports of the store for other programs: each is a folder, written atomically in bounded memory."""
