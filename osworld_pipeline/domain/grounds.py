"""The image and grader version for which a score is valid."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from osworld_pipeline.domain.episode import Episode


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """Another desktop image or another grader may give the same episode another score."""

    image_digest: str
    grader_version: str

    def __str__(self) -> str:
        return f"{self.image_digest[:12] or 'unknown image'}/grader {self.grader_version or 'unknown'}"


def has_other_grounds(episode: Episode, grounds: Collection[Grounds] | None) -> bool:
    """Whether the episode was graded on none of these; False if either side is unknown."""
    own = Grounds(image_digest=episode.image_digest, grader_version=episode.grader_version)
    is_known = bool(own.image_digest or own.grader_version)
    return is_known and bool(grounds) and own not in (grounds or ())


def all_grounds(reported: Iterable[frozenset[Grounds] | None]) -> frozenset[Grounds] | None:
    """The union; None if one of them is unknown."""
    found: set[Grounds] = set()
    for one in reported:
        if one is None:
            return None
        found |= one
    return frozenset(found)
