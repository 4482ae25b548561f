"""A program for a desktop's own Python that answers keys and clicks with a delay, used by `bench_settling`.
`slow_window.py SEED SHORTEST_S LONGEST_S STRIP`: answers are drawn after a delay between the two; in a strip of STRIP
pixels at the bottom a caret blinks and a clock runs, which are not answers."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import heapq
import itertools
import random
import select
import sys
import time
from collections.abc import Callable

from Xlib import XK, X
from Xlib.display import Display

BLINK_S, CLOCK_S = 0.5, 1.0
NUM_PIECES = 4


class SlowWindow:
    """Fills the screen. A key's letter selects the kind of answer; a click is answered as `late`."""

    def __init__(self, seed: int, *, delays_s: tuple[float, float], strip: int) -> None:
        self.delays_s, self.strip = delays_s, strip
        self.random = random.Random(seed)
        self.display = Display()
        screen = self.display.screen()
        self.width, self.height = screen.width_in_pixels, screen.height_in_pixels
        self.window = screen.root.create_window(
            0, 0, self.width, self.height, 0, screen.root_depth, background_pixel=0xFFFFFF, override_redirect=True,
            event_mask=X.ExposureMask | X.KeyPressMask | X.ButtonPressMask,
        )  # fmt: skip
        self.paint = self.window.create_gc(foreground=0)
        self.window.map()
        self.display.sync()
        self.window.set_input_focus(X.RevertToParent, X.CurrentTime)
        self.count = itertools.count()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.has_caret = False
        self.after(0, self.blink)
        self.after(0, self.tick)
        self.answers = {"l": self.late, "e": self.echo, "f": self.frame, "b": self.busy, "s": self.stages,
                        "m": self.mark, "n": lambda delay_s: None}  # fmt: skip

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if not self.display.pending_events() else 0.0
            if not self.display.pending_events():
                select.select([self.display], [], [], wait_s)
            while self.display.pending_events():
                self.handle(self.display.next_event())
            while self.due and self.due[0][0] <= time.monotonic():
                heapq.heappop(self.due)[2]()
            self.display.flush()

    def handle(self, event: object) -> None:
        kind = getattr(event, "type", None)
        if kind == X.ButtonPress:
            self.late(self.delay_s())
        elif kind == X.KeyPress:
            letter = XK.keysym_to_string(self.display.keycode_to_keysym(getattr(event, "detail", 0), 0))
            if letter in self.answers:
                self.answers[letter](self.delay_s())

    def delay_s(self) -> float:
        return self.random.uniform(*self.delays_s)

    def after(self, delay_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time.monotonic() + delay_s, next(self.count), then))

    # Answers

    def late(self, delay_s: float) -> None:
        """Nothing at first, then the whole answer."""
        self.after(delay_s, self.content)

    def echo(self, delay_s: float) -> None:
        """A letter-sized change at once, then the whole answer."""
        self.fill(16, 16, 8, 12)
        self.after(delay_s, self.content)

    def frame(self, delay_s: float) -> None:
        """A large part at once, then a pause, then the whole answer."""
        self.fill(0, 0, self.width, self.height // 4)
        self.after(delay_s, self.content)

    def busy(self, delay_s: float) -> None:
        """Does the same as `frame`, but computes during the pause."""
        self.fill(0, 0, self.width, self.height // 4)
        self.display.flush()
        until = time.monotonic() + delay_s
        while time.monotonic() < until:
            pass
        self.content()

    def stages(self, delay_s: float) -> None:
        """Piece by piece, the last at the end of the delay."""
        step = (self.height - self.strip) // NUM_PIECES
        for piece in range(NUM_PIECES):
            self.after(delay_s * (piece + 1) / NUM_PIECES, lambda top=piece * step: self.fill(0, top, self.width, step))

    def mark(self, delay_s: float) -> None:
        """Draws only a small mark, after the delay."""
        self.after(delay_s, lambda: self.fill(self.random.randrange(self.width - 8), 64, 8, 8))

    def content(self) -> None:
        for _ in range(12):
            left, top = self.random.randrange(self.width - 80), self.random.randrange(self.height - self.strip - 40)
            self.fill(left, top, 80, 40)

    # The strip

    def blink(self) -> None:
        self.has_caret = not self.has_caret
        self.fill(8, self.height - self.strip + 4, 2, 16, 0 if self.has_caret else 0xFFFFFF)
        self.after(BLINK_S, self.blink)

    def tick(self) -> None:
        for digit in range(8):
            shade = self.random.randrange(1 << 24)
            self.fill(self.width - 72 + 8 * digit, self.height - self.strip + 6, 7, 12, shade)
        self.after(CLOCK_S, self.tick)

    def fill(self, left: int, top: int, width: int, height: int, colour: int | None = None) -> None:
        self.paint.change(foreground=self.random.randrange(1 << 24) if colour is None else colour)
        self.window.fill_rectangle(self.paint, left, top, width, height)


if __name__ == "__main__":
    seed, shortest_s, longest_s, strip = sys.argv[1:]
    SlowWindow(int(seed), delays_s=(float(shortest_s), float(longest_s)), strip=int(strip)).run()
