"""One command that checks, builds, tags and describes a release: `make release VERSION=0.2.0`.

The release commit is made of Git objects, and the packages are built from an export of its tree. So no tracked file and
no reference changes before the last two steps: the tag, which is one reference, and a fast-forward of the branch to it.
A kill before the tag changes at most the ignored folder dist/; after it, one command remains, and the next call names
it.
"""
