"""A state on an object store: pushed from where it is made, and read through a local cache elsewhere.

    remote.json            the manifest: which files the state consists of; swapped last, for readers see one moment
    objects/ab/ab12...     files by the SHA-256 of their content: parts, tables, suites, checkpoints, the catalog
    blobs/ab/ab12...png    images, as in the state folder; named by rows and not by the manifest

A state folder keeps what it last pushed or pulled in `remote/`: both sides are compared with that, so neither
overwrites what the other changed.
"""
