"""The fixed conversations of the parity probe, in sizes that fit a recipe."""

from dataclasses import dataclass

from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.agent.parity_screens import draw_screen
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection

SHAPED_PIXELS = 96 * 1024
"""Most pixels of a screen drawn for its shape: at most 96 tokens. The sizes stay above the minimum below which a
published image processor resizes an image."""
WARM = 2.0
"""A temperature at which a trained policy also gives tokens of moderate probability, because only these show changes of
its logits."""


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    name: str
    screens: tuple[bytes, ...]
    """One for each user turn, with a response after each."""
    temperature: float
    is_text: bool = False
    """Omits the screens, as in a recipe without screenshots."""


@dataclass(frozen=True, kw_only=True)
class ParitySample:
    """The request to an engine, and its response."""

    case: str
    """Includes the turn if there are several."""
    request: GenerateRequest
    result: GenerateResult


def parity_cases(agent: AgentSection, desktop: DesktopSection) -> tuple[ParityCase, ...]:
    """A text turn; a screen of the recipe's desktop size; a tall screen, so that exchanged heights and widths are
    detected; two turns with a square and a wide screen; and two turns with wide screens, whose order matters. Only text
    if the recipe shows no screenshots."""
    text = ParityCase(name="text", screens=(draw_screen(32, 32, seed=0),), temperature=WARM, is_text=True)
    if not agent.show_screenshots:
        return (text,)
    budget = min(agent.max_pixels, SHAPED_PIXELS)
    screen = fit_size(desktop.screen_width, desktop.screen_height, agent.max_pixels)
    wide, tall, square = fit_size(768, 256, budget), fit_size(256, 768, budget), fit_size(512, 512, budget)
    return (
        text,
        ParityCase(name="screen", screens=(draw_screen(*screen, seed=1),), temperature=WARM),
        ParityCase(name="tall screen", screens=(draw_screen(*tall, seed=2),), temperature=1.0),
        ParityCase(
            name="two turns", screens=(draw_screen(*square, seed=3), draw_screen(*wide, seed=4)), temperature=WARM
        ),
        ParityCase(
            name="order of screens", screens=(draw_screen(*wide, seed=5), draw_screen(*wide, seed=6)), temperature=WARM
        ),
    )
