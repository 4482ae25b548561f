"""The fixed conversations of the parity probe, in sizes that fit a recipe."""

from dataclasses import dataclass

from osworld_pipeline.agent.images import fit_size
from osworld_pipeline.agent.parity_screens import draw_screen
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection, DesktopSection

SHAPED_PIXELS = 96 * 1024
"""Of a screen that is drawn for its shape: 96 tokens, above the least that a published image processor leaves as it
is."""
WARM = 2.0
"""A temperature at which a trained policy, too, gives tokens of moderate probability: only these tell how its logits
moved."""


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    name: str
    screens: tuple[bytes, ...]
    """One for each user turn, an answer after each."""
    temperature: float
    is_text: bool = False
    """The screens are left out, as in a recipe without screenshots."""


@dataclass(frozen=True, kw_only=True)
class ParitySample:
    """What an engine was asked, and what it sampled."""

    case: str
    """With its turn where it has several."""
    request: GenerateRequest
    result: GenerateResult


def parity_cases(agent: AgentSection, desktop: DesktopSection) -> tuple[ParityCase, ...]:
    """A turn of text; a screen as the recipe's desktops have it; a tall and a wide one, whose heights and widths cannot
    be taken for each other; two turns with screens of different sizes; and two of the same size, whose order matters.
    Text alone where the recipe shows no screenshots."""
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
