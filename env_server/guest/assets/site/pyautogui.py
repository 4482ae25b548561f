"""PyAutoGUI's interface on this desktop's own XTest input. It types every requested character, `<` included."""

import collections
import contextlib
import os
import time

from osworld_guest.calls import CALL_NAMES, bind_call, perform_call
from osworld_guest.keys import key_names, keysym_of_key
from osworld_guest.xinput import Input
from Xlib.display import Display

__version__ = "0.9.54"
FAILSAFE = True
FAILSAFE_POINTS = [(0, 0)]
PAUSE = 0.1
MINIMUM_DURATION = 0.1
LEFT, MIDDLE, RIGHT, PRIMARY, SECONDARY = "left", "middle", "right", "primary", "secondary"
KEY_NAMES = KEYBOARD_KEYS = [chr(n) for n in range(0x20, 0x7F)] + list(key_names())
Point = collections.namedtuple("Point", "x y")
Size = collections.namedtuple("Size", "width height")


class PyAutoGUIException(Exception):
    pass


class FailSafeException(PyAutoGUIException):
    pass


class ImageNotFoundException(PyAutoGUIException):
    pass


_devices = []


def _device():
    if not _devices:
        _devices.append(Input(Display(os.environ.get("DISPLAY", ":0"))))
    return _devices[0]


def failSafeCheck():
    if FAILSAFE and tuple(position()) in FAILSAFE_POINTS:
        raise FailSafeException(
            "PyAutoGUI fail-safe triggered from mouse moving to a corner of the screen. To disable this fail-safe, set "
            "pyautogui.FAILSAFE to False. DISABLING FAIL-SAFE IS NOT RECOMMENDED."
        )


def _make(name):
    def call(*args, **kwargs):
        failSafeCheck()
        pause = kwargs.pop("_pause", True)
        args = [arg for arg in args if not callable(arg)]  # drops a tween function passed by position
        if args or kwargs or name != "moveTo":  # without arguments moveTo does nothing
            perform_call(_device(), *bind_call({"name": name, "args": args, "kwargs": kwargs}))
        if pause and PAUSE:
            time.sleep(PAUSE)

    call.__name__ = call.__qualname__ = name
    return call


for _name in CALL_NAMES:
    if _name != "sleep":
        globals()[_name] = _make(_name)
globals()["shortcut"] = globals()["hotkey"]


def sleep(seconds):
    time.sleep(seconds)


def position(x=None, y=None):
    now_x, now_y = _device().position()
    return Point(now_x if x is None else int(x), now_y if y is None else int(y))


def size():
    return Size(*_device().size())


resolution = size


def onScreen(x, y=None):
    if y is None:
        x, y = x
    width, height = size()
    return 0 <= x < width and 0 <= y < height


def isValidKey(key):
    try:
        keysym_of_key(key)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def hold(keys, logScreenshot=None, _pause=True):
    names = [keys] if isinstance(keys, str) else list(keys)
    for name in names:
        globals()["keyDown"](name)
    try:
        yield
    finally:
        for name in reversed(names):
            globals()["keyUp"](name)


def screenshot(imageFilename=None, region=None):
    from PIL import ImageGrab

    image = ImageGrab.grab(xdisplay=os.environ.get("DISPLAY", ":0"))
    if region is not None:
        left, top, width, height = region
        image = image.crop((left, top, left + width, top + height))
    if imageFilename is not None:
        image.save(imageFilename)
    return image


def pixel(x, y):
    return screenshot().getpixel((x, y))


def pixelMatchesColor(x, y, expectedRGBColor, tolerance=0):
    found = pixel(x, y)
    return all(abs(a - b) <= tolerance for a, b in zip(found, expectedRGBColor, strict=False))


def linear(n):
    return n


for _curve in ("Quad", "Cubic", "Quart", "Quint", "Sine", "Expo", "Circ", "Elastic", "Back", "Bounce"):
    for _side in ("easeIn", "easeOut", "easeInOut"):
        globals()[_side + _curve] = linear  # every movement here is linear
