"""The image and grader version for which a score is valid."""

from collections.abc import Collection
from dataclasses import dataclass

from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.rollout.env_client import EnvClient


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


async def grounds_of_servers(client: EnvClient) -> frozenset[Grounds] | None:
    """The images and graders of the servers; None if one of them does not report its own."""
    found = await client.describe()
    if any(info is None for info in found):
        return None
    return frozenset(
        Grounds(image_digest=str(info.get("image_digest", "")), grader_version=str(info.get("grader_version", "")))
        for info in found
        if info is not None
    )
