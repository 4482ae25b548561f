"""A queue that is fair to clients: first come, first served within a client, and clients take turns."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def push(self, client_id: str, item: Item) -> None:
        self._lines.setdefault(client_id, deque()).append(item)

    def pop(self) -> Item:
        """The next item in turn; its client goes to the end. IndexError if the queue is empty."""
        if not self._lines:
            raise IndexError("no client waits")
        client_id, line = next(iter(self._lines.items()))
        item = line.popleft()
        if line:
            self._lines.move_to_end(client_id)
        else:
            del self._lines[client_id]
        return item

    def remove(self, client_id: str, item: Item) -> None:
        """Has no effect after the item has been popped."""
        line = self._lines.get(client_id)
        if line is not None and item in line:
            line.remove(item)
            if not line:
                del self._lines[client_id]
