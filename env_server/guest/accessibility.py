"""The accessibility tree as OSWorld's XML: one element per node, named after its role, with states, attributes,
position, value and actions in OSWorld's namespaces. A separate program: it reads one request per line and writes one
JSON answer per line."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from xml.etree import ElementTree

_BASE = "https://accessibility.ubuntu.example.org/ns/"
NAMESPACES = {
    "st": _BASE + "state",
    "attr": _BASE + "attributes",
    "cp": _BASE + "component",
    "doc": _BASE + "document",
    "docattr": _BASE + "document/attributes",
    "txt": _BASE + "text",
    "val": _BASE + "value",
    "act": _BASE + "action",
}
_T = TypeVar("_T")
MAX_DEPTH = 50
MAX_WIDTH = 1024
READ_LIMIT_S = 10.0
"""Time limit for one tree; nodes that are not read by then are left out."""
SILENT_S, MAX_SILENT = 1.0, 2
"""A request that fails after SILENT_S counts as unanswered; after MAX_SILENT unanswered requests the rest of the
program's tree is skipped."""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_IN_A_NAME = re.compile(r"[^\w.-]", re.ASCII)

for _prefix, _uri in NAMESPACES.items():
    ElementTree.register_namespace(_prefix, _uri)


def element_name(role: str) -> str:
    """A role as an XML name: `push button` is `push-button`."""
    name = _NOT_IN_A_NAME.sub("-", role.strip()) or "unknown"
    return name if name[0].isalpha() or name[0] == "_" else f"_{name}"


def plain_text(text: str) -> str:
    """Text without the characters that XML cannot hold and the markers of embedded objects."""
    return _NOT_XML.sub("", text).replace("\ufffc", "").replace("\ufffd", "")


def build_element(
    *,
    role: str,
    name: str,
    text: str = "",
    states: Iterable[str] = (),
    attributes: Iterable[tuple[str, str]] = (),
    place: tuple[int, int, int, int] | None = None,
    value: tuple[float, float, float, float] | None = None,
    actions: Iterable[tuple[str, str, str]] = (),
    interfaces: Iterable[str] = (),
) -> ElementTree.Element:
    """One node. `place` is x, y, width, height on the screen; `value` is current, minimum, maximum, step; `actions` are
    name, description, key binding."""
    found = {"name": plain_text(name)}
    for state in states:
        found[_qualified("st", state)] = "true"
    for key, text_value in attributes:
        if key:
            found[_qualified("attr", key)] = plain_text(text_value)
    if place is not None:
        found[_qualified("cp", "screencoord")] = str(place[:2])
        found[_qualified("cp", "size")] = str(place[2:])
    if value is not None:
        for key, number in zip(("value", "min", "max", "step"), value, strict=True):
            found[_qualified("val", key)] = str(number)
    for interface in interfaces:
        found[interface] = "true"
    for action, description, binding in actions:
        found[_qualified("act", f"{action}_desc")] = plain_text(description)
        found[_qualified("act", f"{action}_kb")] = plain_text(binding)
    element = ElementTree.Element(element_name(role), found)
    if text:
        element.text = plain_text(text)
    return element


def _qualified(prefix: str, name: str) -> str:
    return f"{{{NAMESPACES[prefix]}}}{element_name(name)}"


class AccessibilityTree:
    """Reads AT-SPI."""

    def __init__(self) -> None:
        self._atspi: Any = None
        self._glib: Any = None
        self._until = 0.0
        self._num_silent = 0
        """Requests that the current program has left unanswered."""

    def xml(self) -> str:
        desktop = self._desktop()
        root = ElementTree.Element("desktop-frame")
        for application in self._children(desktop):
            self._num_silent = 0
            element = self._ask(lambda node=application: self._element(node, 1))
            if element is not None:
                root.append(element)
        return ElementTree.tostring(root, encoding="unicode")

    def terminal_text(self) -> str | None:
        """Text of the focused terminal widget, else of a visible one; None if no program exposes one."""
        showing = None
        for application in self._children(self._desktop()):
            self._num_silent = 0
            for node in self._descendants(application, 1):
                if self._ask(node.get_role_name) != "terminal":
                    continue
                states = self._states(node)
                if "focused" in states:
                    return self._text(node).rstrip()
                if "showing" in states and showing is None:
                    showing = node
        return None if showing is None else self._text(showing).rstrip()

    def _desktop(self) -> Any:
        if self._atspi is None:
            import gi

            gi.require_version("Atspi", "2.0")
            from gi.repository import Atspi, GLib

            Atspi.init()
            Atspi.set_timeout(1500, 5000)
            self._atspi, self._glib = Atspi, GLib
        context = self._glib.MainContext.default()
        while context.iteration(False):  # process pending changes, or the cache returns outdated state
            pass
        self._until, self._num_silent = time.monotonic() + READ_LIMIT_S, 0
        return self._atspi.get_desktop(0)

    def _ask(self, question: Callable[[], _T]) -> _T | None:
        """None if the program behind the node is gone, hangs or lacks the interface, or the time limit has passed."""
        began = time.monotonic()
        if began > self._until or self._num_silent >= MAX_SILENT:
            return None
        try:
            return question()
        except self._glib.GError:
            self._num_silent += time.monotonic() - began > SILENT_S
            return None

    def _children(self, node: Any) -> list[Any]:
        count = self._ask(node.get_child_count) or 0
        found = [self._ask(lambda i=index: node.get_child_at_index(i)) for index in range(min(count, MAX_WIDTH))]
        return [child for child in found if child is not None]

    def _descendants(self, node: Any, depth: int) -> Iterable[Any]:
        yield node
        if depth < MAX_DEPTH:
            for child in self._children(node):
                yield from self._descendants(child, depth + 1)

    def _states(self, node: Any) -> set[str]:
        states = self._ask(lambda: node.get_state_set().get_states()) or []
        return {state.value_nick.replace("-", "_") for state in states}

    def _text(self, node: Any) -> str:
        iface = self._ask(node.get_text_iface)
        if iface is None:
            return ""
        count = self._ask(lambda: self._atspi.Text.get_character_count(node)) or 0
        return self._ask(lambda: self._atspi.Text.get_text(node, 0, count)) or ""

    def _element(self, node: Any, depth: int) -> ElementTree.Element:
        interfaces = set(self._ask(node.get_interfaces) or ())
        states = self._states(node)
        place = value = None
        if "Component" in interfaces and {"visible", "showing"} <= states:
            box = self._ask(lambda: node.get_extents(self._atspi.CoordType.SCREEN))
            place = None if box is None else (box.x, box.y, box.width, box.height)
        if "Value" in interfaces:
            value = self._value(node)
        element = build_element(
            role=self._ask(node.get_role_name) or "unknown",
            name=self._ask(node.get_name) or "",
            text=self._text(node) if "Text" in interfaces else "",
            states=sorted(states),
            attributes=sorted((self._ask(node.get_attributes) or {}).items()),
            place=place,
            value=value,
            actions=self._actions(node) if "Action" in interfaces else (),
            interfaces=[name.lower() for name in ("Image", "Selection") if name in interfaces],
        )
        if depth < MAX_DEPTH:
            for child in self._children(node):
                element.append(self._element(child, depth + 1))
        return element

    def _value(self, node: Any) -> tuple[float, float, float, float]:
        read = self._atspi.Value
        questions = (
            read.get_current_value,
            read.get_minimum_value,
            read.get_maximum_value,
            read.get_minimum_increment,
        )
        now, least, most, step = (self._ask(lambda ask=ask: ask(node)) or 0.0 for ask in questions)
        return now, least, most, step

    def _actions(self, node: Any) -> list[tuple[str, str, str]]:
        read = self._atspi.Action
        count = self._ask(lambda: read.get_n_actions(node)) or 0
        found = []
        for index in range(count):
            name, description, binding = (
                self._ask(lambda ask=ask, i=index: ask(node, i)) or ""
                for ask in (read.get_action_name, read.get_action_description, read.get_key_binding)
            )
            found.append((name.replace(" ", "-"), description, binding))
        return found


def main() -> None:
    tree = AccessibilityTree()
    questions: dict[str, Callable[[], str | None]] = {"xml": tree.xml, "terminal_text": tree.terminal_text}
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"answer": questions[line.strip()]()}
        except Exception as error:  # noqa: BLE001 - the boundary: every error is reported to the agent
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
