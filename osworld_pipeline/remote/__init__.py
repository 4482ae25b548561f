"""A state on an object store: pushed from its origin, and read through a local cache elsewhere.

    remote.json            the manifest: which files the state consists of; swapped last, so readers see a snapshot
    objects/ab/ab12...     files by the SHA-256 of their content: parts, tables, suites, checkpoints, the catalog
    blobs/ab/ab12...png    single images, as in the state folder; named by rows, not by the manifest
    blobs/packs/....zip    packs of images, as in the state folder; named by the manifest

A state folder keeps the manifest of its last push or pull in `remote/`. Both sides are compared with it, so that
neither overwrites changes of the other.
"""
