"""Maps pyautogui key names and typed characters to X keysyms. Pure; needs no display."""

SHIFT_L = 0xFFE1
RETURN = 0xFF0D

_NAMED = {
    "backspace": 0xFF08, "tab": 0xFF09, "clear": 0xFF0B, "enter": 0xFF0D, "return": 0xFF0D, "pause": 0xFF13,
    "scrolllock": 0xFF14, "esc": 0xFF1B, "escape": 0xFF1B, "home": 0xFF50, "left": 0xFF51, "up": 0xFF52,
    "right": 0xFF53, "down": 0xFF54, "pageup": 0xFF55, "pgup": 0xFF55, "pagedown": 0xFF56, "pgdn": 0xFF56,
    "end": 0xFF57, "select": 0xFF60, "print": 0xFF61, "printscreen": 0xFF61, "prntscrn": 0xFF61, "prtsc": 0xFF61,
    "prtscr": 0xFF61, "execute": 0xFF62, "insert": 0xFF63, "apps": 0xFF67, "menu": 0xFF67, "help": 0xFF6A,
    "modechange": 0xFF7E, "numlock": 0xFF7F, "multiply": 0xFFAA, "add": 0xFFAB, "separator": 0xFFAC,
    "subtract": 0xFFAD, "decimal": 0xFFAE, "divide": 0xFFAF, "shift": SHIFT_L, "shiftleft": SHIFT_L,
    "shiftright": 0xFFE2, "ctrl": 0xFFE3, "control": 0xFFE3, "ctrlleft": 0xFFE3, "ctrlright": 0xFFE4,
    "capslock": 0xFFE5, "alt": 0xFFE9, "altleft": 0xFFE9, "altright": 0xFFEA, "option": 0xFFE9,
    "optionleft": 0xFFE9, "optionright": 0xFFEA, "win": 0xFFEB, "winleft": 0xFFEB, "super": 0xFFEB, "meta": 0xFFEB,
    "command": 0xFFEB, "cmd": 0xFFEB, "winright": 0xFFEC, "del": 0xFFFF, "delete": 0xFFFF, "space": 0x20,
    "yen": 0xA5, "volumedown": 0x1008FF11, "volumemute": 0x1008FF12, "volumeup": 0x1008FF13,
    "playpause": 0x1008FF14, "stop": 0x1008FF15, "prevtrack": 0x1008FF16, "nexttrack": 0x1008FF17,
    "browserhome": 0x1008FF18, "launchmail": 0x1008FF19, "browsersearch": 0x1008FF1B, "browserback": 0x1008FF26,
    "browserforward": 0x1008FF27, "browserstop": 0x1008FF28, "browserrefresh": 0x1008FF29,
    "browserfavorites": 0x1008FF30, "sleep": 0x1008FF2F,
}  # fmt: skip
_NAMED |= {f"f{n}": 0xFFBD + n for n in range(1, 25)}
_NAMED |= {f"num{n}": 0xFFB0 + n for n in range(10)}

_CONTROL = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09, "\b": 0xFF08, "\x1b": 0xFF1B, "\x7f": 0xFFFF}


def keysym_of_char(char: str) -> int:
    """The keysym that types exactly `char`. ValueError for a control character that no key types."""
    if char in _CONTROL:
        return _CONTROL[char]
    point = ord(char)
    if 0x20 <= point <= 0x7E or 0xA0 <= point <= 0xFF:
        return point
    if point < 0x20 or 0x7F <= point < 0xA0 or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"no key types the character U+{point:04X}; leave it out")
    return 0x01000000 | point


def keysym_of_key(name: str) -> int:
    """The keysym of a pyautogui key name, or of a single character. ValueError for an unknown name."""
    if len(name) == 1:
        return keysym_of_char(name)
    keysym = _NAMED.get(name.lower())
    if keysym is None:
        raise ValueError(f"no key is called {name!r}; use pyautogui's key names")
    return keysym


def key_names() -> tuple[str, ...]:
    """Every name except the single characters."""
    return tuple(sorted(_NAMED))
