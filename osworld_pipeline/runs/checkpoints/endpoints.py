"""An OpenAI-compatible endpoint as a checkpoint: its address names the server and the model."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from osworld_pipeline.errors import StoreError
from osworld_pipeline.recipes import Recipe

SCHEMES = ("http://", "https://")


def is_address(text: str) -> bool:
    return text.startswith(SCHEMES)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    url: str
    """Base address of the API, such as http://host/v1; its path is not checked."""
    model: str

    @classmethod
    def parse(cls, address: str) -> "Endpoint":
        """`http(s)://host/v1#model`.

        Raises:
            StoreError: the address is not of this form, or holds a user name or a password.
        """
        parts = urlsplit(address.strip())
        if parts.username is not None or parts.password is not None:
            raise StoreError(
                f"the address of {parts.hostname} holds a user name or a password, which would be stored with every "
                "score: leave it out and set ENGINE_TOKEN"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.fragment or parts.query:
            raise StoreError(f"cannot read '{address}': an endpoint is written http(s)://host/v1#model")
        return cls(url=f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), model=parts.fragment)

    def __str__(self) -> str:
        return f"{self.url}#{self.model}"

    def sampled_by(self, recipe: Recipe) -> Recipe:
        """The recipe with this endpoint as its engine."""
        engine = {"kind": "openai", "urls": (self.url,), "launch": None, "model": self.model}
        return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=engine)})
