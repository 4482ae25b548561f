"""What a release asks of Git: the state of the checkout, a commit made without the working tree, and the tag."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scripts.release.errors import ReleaseError
from scripts.release.programs import output_of

PREFIX = "v"


@dataclass(frozen=True)
class Repository:
    root: Path

    def head(self) -> str:
        return self._text("rev-parse", "HEAD")

    def need_clean(self) -> None:
        """Raises ReleaseError if a tracked file differs from HEAD, or an untracked one is not ignored."""
        changed = self._text("status", "--porcelain").splitlines()
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            names = ", ".join(line.split(maxsplit=1)[-1] for line in changed[:3])
            raise ReleaseError(f"the checkout has changes ({names}{more}): commit them, or `git stash` them")

    def versions(self) -> list[Version]:
        """The released versions by their tags, in order."""
        return sorted(filter(None, map(_version, self._text("tag", "--list", f"{PREFIX}*").split())))

    def need_merged(self, version: Version) -> None:
        """Raises ReleaseError if a release was cut off between its tag and the branch."""
        tag = f"{PREFIX}{version}"
        if version in self.versions() and self._text("merge-base", "HEAD", tag) != self._text(
            "rev-parse", f"{tag}^{{commit}}"
        ):
            raise ReleaseError(f"{tag} exists and the branch does not contain it: run `git merge --ff-only {tag}`")

    def tree_with(self, files: Mapping[str, bytes]) -> str:
        """The tree of HEAD with these contents; the index of the checkout does not change."""
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "GIT_INDEX_FILE": str(Path(folder) / "index")}
            self._git("read-tree", "HEAD", variables=variables)
            for path, data in files.items():
                blob = self._git("hash-object", "-w", "--stdin", data=data).decode().strip()
                self._git("update-index", "--cacheinfo", f"100644,{blob},{path}", variables=variables)
            return self._git("write-tree", variables=variables).decode().strip()

    def export(self, tree: str, folder: Path) -> None:
        """Writes the tree into a new folder."""
        folder.mkdir()
        output_of("tar", "-x", cwd=folder, data=self._git("archive", "--format=tar", tree))

    def names(self, tree: str, *folders: str) -> set[str]:
        """Paths of the files in these folders of a tree."""
        return set(filter(None, self._git("ls-tree", "-r", "-z", "--name-only", tree, *folders).decode().split("\0")))

    def commit(self, tree: str, parent: str, subject: str) -> str:
        """A commit that no reference names yet."""
        return self._git("commit-tree", tree, "-p", parent, "-F", "-", data=subject.encode()).decode().strip()

    def tag(self, version: Version, commit: str, notes: str) -> None:
        # Not stripped: a heading of the notes begins with a comment character.
        self._git(
            "tag", "--annotate", "--cleanup=verbatim", "-F", "-", f"{PREFIX}{version}", commit, data=notes.encode()
        )

    def fast_forward(self, version: Version) -> None:
        self._git("merge", "--quiet", "--ff-only", f"{PREFIX}{version}")

    def _text(self, *words: str) -> str:
        return self._git(*words).decode().strip()

    def _git(self, *words: str, data: bytes = b"", variables: Mapping[str, str] | None = None) -> bytes:
        return output_of("git", *words, cwd=self.root, data=data, variables=variables)


def _version(tag: str) -> Version | None:
    try:
        return Version(tag.removeprefix(PREFIX))
    except InvalidVersion:
        return None
