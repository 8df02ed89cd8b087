"""Two generations of a service know the same regions while both have clients.

A coordinator tells the other one what has come and gone with it. Its clients hear of that when the
other has published it, too, or does not answer: their next request may reach either of them.

After a break of the link, each coordinator tells the other all regions that it has, and which have
gone without the other's knowledge. Regions keep their numbers; the numbers of two generations lie
far apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shmserve.core.regions.region_book import RegionBook
from shmserve.protocol.control.region_messages import RegionAnswer, RegionsTaken, SharedRegions
from shmserve.transport.channel import MAX_FDS

_PATIENCE_S = 1.0  # for the other one to publish
_MANY = 4096  # numbers in one message, and most that are remembered

Answers = list[tuple[str, RegionAnswer]]
Say = Callable[[SharedRegions | RegionsTaken, "tuple[int, ...]"], None]


class RegionSharing:
    """With one other coordinator, if there is one (`say`).

    Attributes:
        theirs: numbers of regions that are only to be told to others than them.
        first: nothing has been heard of the other one yet.
        gone: numbers of regions that the other one may still have, oldest first, by the ticket of
            the message that told it (0: none yet). It is told again when it has a new connection,
            and what it says of them meanwhile is out of date.
    """

    def __init__(self) -> None:
        self.theirs: set[int] = set()
        self.first = True
        self.gone: dict[int, int] = {}
        self._say: Say | None = None
        self._all = False
        self._told = self._confirmed = 0  # tickets
        self._held: deque[tuple[int, float, Answers]] = deque()  # by ticket, and until when
        self._heard: list[RegionsTaken] = []

    def begin(self, say: Say, told_all: bool) -> None:
        """There is another one, or another connection to it. `told_all`: it is to hear of
        everything that is known here."""
        self._say, self._all = say, told_all
        self._heard.clear()

    def end(self) -> None:
        """It is gone."""
        self._say, self._confirmed = None, self._told

    @property
    def waiting(self) -> bool:
        """Whether there is an answer to be waited for."""
        return bool(self._held)

    def taken(self, message: SharedRegions) -> None:
        """Something has been heard, to be confirmed once it is published."""
        self.first = False
        self._heard.append(RegionsTaken(message.ticket))

    def confirmed(self, message: RegionsTaken) -> None:
        """The other one has published what it was told."""
        self._confirmed = max(self._confirmed, message.ticket)
        for number in [n for n, told in self.gone.items() if 0 < told <= message.ticket]:
            del self.gone[number]

    def tell(
        self, book: RegionBook, fds: Mapping[int, int], come: Iterable[int], gone: Sequence[int]
    ) -> None:
        """What has been published now."""
        say = self._say
        heard, self._heard = self._heard, []
        whole = self._all and say is not None
        if say is not None or self._told:  # else there never was another one
            self.gone.update(dict.fromkeys(gone, 0))
        for number in list(self.gone)[: -_MANY - len(gone)]:
            del self.gone[number]
        if say is None:
            self.theirs.clear()
            return
        for confirmation in heard:
            say(confirmation, ())
        numbers = [region.number for region in book.regions.values()] if whole else list(come)
        news = [n for n in dict.fromkeys(numbers) if n not in self.theirs]
        self.theirs.clear()
        regions = [region for n in news if (region := book.get(n)) is not None]
        regions = [
            region for region in regions if not region.memory.has_descriptor or region.number in fds
        ]
        self._all = False
        for start in range(0, max(len(regions), 1 if whole else 0), MAX_FDS):
            part = tuple(regions[start : start + MAX_FDS])
            riding = tuple(fds[region.number] for region in part if region.memory.has_descriptor)
            self._told += 1
            say(SharedRegions(self._told, part, (), book.next_number), riding)
        lost = list(self.gone) if whole else list(gone)
        for start in range(0, len(lost), _MANY):
            some = tuple(lost[start : start + _MANY])
            self._told += 1
            self.gone.update(dict.fromkeys(some, self._told))
            say(SharedRegions(self._told, (), some, book.next_number), ())

    def released(self, answers: Answers) -> Answers:
        """What clients can be told now, of these and those before."""
        now = time.monotonic()
        if answers:
            self._held.append((self._told, now + _PATIENCE_S, answers))
        free: Answers = []
        while self._held and (self._held[0][0] <= self._confirmed or now >= self._held[0][1]):
            free += self._held.popleft()[2]
        return free
