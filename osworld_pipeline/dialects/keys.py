"""Key names: pyautogui's, and those of models and QEMU for the same keys."""

from osworld_pipeline.errors import ActionParseError

KEY_ALIASES = {
    "control": "ctrl",
    "control_l": "ctrl",
    "control_r": "ctrlright",
    "escape": "esc",
    "return": "enter",
    "super": "win",
    "super_l": "win",
    "meta": "win",
    "cmd": "win",
    "windows": "win",
    "alt_l": "alt",
    "shift_l": "shift",
    "page_up": "pageup",
    "page_down": "pagedown",
    "prior": "pageup",
    "next": "pagedown",
    "back_space": "backspace",
    "del": "delete",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    "spacebar": "space",
    "caps_lock": "capslock",
    "print_screen": "printscreen",
}
KEY_NAMES = frozenset(
    (
        *("alt", "altleft", "altright", "ctrl", "ctrlleft", "ctrlright", "shift", "shiftleft", "shiftright"),
        *("win", "winleft", "winright", "menu", "apps", "esc", "enter", "tab", "space", "backspace", "delete"),
        *("insert", "home", "end", "pageup", "pagedown", "up", "down", "left", "right"),
        *("capslock", "numlock", "scrolllock", "pause", "printscreen"),
    )
) | {f"f{number}" for number in range(1, 25)}

QEMU_KEYS = {
    "ret": "enter",
    "spc": "space",
    "esc": "esc",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "meta_l": "win",
    "meta_r": "winright",
    "alt_r": "altright",
    "ctrl_r": "ctrlright",
    "shift_r": "shiftright",
    "caps_lock": "capslock",
    "num_lock": "numlock",
    "scroll_lock": "scrolllock",
    "print": "printscreen",
    "sysrq": "printscreen",
    "compose": "apps",
    "kp_enter": "enter",
    "minus": "-",
    "equal": "=",
    "bracket_left": "[",
    "bracket_right": "]",
    "semicolon": ";",
    "apostrophe": "'",
    "grave_accent": "`",
    "backslash": "\\",
    "comma": ",",
    "dot": ".",
    "slash": "/",
    "less": "<",
    "asterisk": "*",
    **{f"kp_{digit}": str(digit) for digit in range(10)},
}
"""QEMU's monitor names (HMP `sendkey`) of keys with other names in pyautogui."""
_TO_QEMU = {ours: theirs for theirs, ours in reversed(QEMU_KEYS.items()) if not theirs.startswith("kp_")}


def normalise_key(name: str) -> str:
    """pyautogui's name of a key; a single printable character is unchanged, except a blank, which is `space`.

    Raises:
        ActionParseError: there is no such key.
    """
    if len(name) == 1 and name.isprintable() and name != " ":
        return name
    lowered = name.strip().lower() if name != " " else "space"
    lowered = KEY_ALIASES.get(lowered, lowered)
    if lowered not in KEY_NAMES:
        raise ActionParseError(f"unknown key {name[:40]!r}")
    return lowered


def key_from_qemu(name: str) -> str:
    """pyautogui's name of a key from its name in QEMU's monitor or in pyautogui.

    Raises:
        ActionParseError: there is no such key.
    """
    return QEMU_KEYS.get(name.lower()) or normalise_key(name)


def key_to_qemu(name: str) -> str:
    """QEMU's name of a pyautogui key; the same if QEMU has no other name."""
    return _TO_QEMU.get(name, name)
