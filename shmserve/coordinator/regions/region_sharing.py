"""Region sharing: both generations of a service know the same regions while both have clients.

A coordinator tells the other generation's coordinator which regions were registered and
unregistered. Clients get their answers once the other coordinator has published the change, or has
not answered in time, because a client's next request may reach either generation. After a break of
the link, each coordinator sends all of its regions, and the regions unregistered without the
other's knowledge. Regions keep their numbers; the numbers of two generations lie far apart.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shmserve.core.regions.region_book import RegionBook
from shmserve.protocol.control.region_messages import RegionAnswer, RegionsTaken, SharedRegions
from shmserve.transport.channel import MAX_FDS

_PATIENCE_S = 1.0  # time for the other coordinator to publish
_MAX_NUMBERS = 4096  # most numbers in one message, and most numbers remembered

Answers = list[tuple[str, RegionAnswer]]
Say = Callable[[SharedRegions | RegionsTaken, "tuple[int, ...]"], None]


class RegionSharing:
    """Exchange of regions with the other generation's coordinator, if connected (`say`).

    Attributes:
        theirs: numbers of regions received from the other coordinator, which need not be sent
            back.
        first: true until the first message of the other coordinator.
        gone: numbers of unregistered regions that the other coordinator may still have, oldest
            first, with the ticket of the message that reported the removal (0: not reported yet).
            Removals are reported again over a new connection. Messages about these regions are out
            of date meanwhile.
    """

    def __init__(self) -> None:
        self.theirs: set[int] = set()
        self.first = True
        self.gone: dict[int, int] = {}
        self._say: Say | None = None
        self._send_all = False
        self._sent_ticket = self._confirmed_ticket = 0  # tickets of messages sent and confirmed
        # by ticket, with the latest time to answer
        self._held_answers: deque[tuple[int, float, Answers]] = deque()
        self._unconfirmed: list[RegionsTaken] = []

    def begin(self, say: Say, send_all: bool) -> None:
        """Start with another coordinator, or with a new connection. `send_all`: true to send every
        known region."""
        self._say, self._send_all = say, send_all
        self._unconfirmed.clear()

    def end(self) -> None:
        """Stop sharing: the other coordinator is gone."""
        self._say, self._confirmed_ticket = None, self._sent_ticket

    @property
    def waiting(self) -> bool:
        """True if answers wait for the other coordinator."""
        return bool(self._held_answers)

    def taken(self, message: SharedRegions) -> None:
        """Note a received message, to be confirmed once published."""
        self.first = False
        self._unconfirmed.append(RegionsTaken(message.ticket))

    def confirmed(self, message: RegionsTaken) -> None:
        """Note that the other coordinator has published a message."""
        self._confirmed_ticket = max(self._confirmed_ticket, message.ticket)
        for number in [n for n, told in self.gone.items() if 0 < told <= message.ticket]:
            del self.gone[number]

    def tell(
        self, book: RegionBook, fds: Mapping[int, int], come: Iterable[int], gone: Sequence[int]
    ) -> None:
        """Send the changes just published: regions that came, and regions that have gone."""
        say = self._say
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        whole = self._send_all and say is not None
        if say is not None or self._sent_ticket:  # otherwise no second coordinator ever existed
            self.gone.update(dict.fromkeys(gone, 0))
        for number in list(self.gone)[: -_MAX_NUMBERS - len(gone)]:
            del self.gone[number]
        if say is None:
            self.theirs.clear()
            return
        for confirmation in unconfirmed:
            say(confirmation, ())
        numbers = [region.number for region in book.regions.values()] if whole else list(come)
        news = [n for n in dict.fromkeys(numbers) if n not in self.theirs]
        self.theirs.clear()
        regions = [region for n in news if (region := book.get(n)) is not None]
        regions = [
            region for region in regions if not region.memory.has_descriptor or region.number in fds
        ]
        self._send_all = False
        for start in range(0, max(len(regions), 1 if whole else 0), MAX_FDS):
            part = tuple(regions[start : start + MAX_FDS])
            riding = tuple(fds[region.number] for region in part if region.memory.has_descriptor)
            self._sent_ticket += 1
            say(SharedRegions(self._sent_ticket, part, (), book.next_number), riding)
        lost = list(self.gone) if whole else list(gone)
        for start in range(0, len(lost), _MAX_NUMBERS):
            some = tuple(lost[start : start + _MAX_NUMBERS])
            self._sent_ticket += 1
            self.gone.update(dict.fromkeys(some, self._sent_ticket))
            say(SharedRegions(self._sent_ticket, (), some, book.next_number), ())

    def released(self, answers: Answers) -> Answers:
        """Return the answers that clients may get now, from `answers` and from earlier calls."""
        now = time.monotonic()
        if answers:
            self._held_answers.append((self._sent_ticket, now + _PATIENCE_S, answers))
        free: Answers = []
        while self._held_answers and (
            self._held_answers[0][0] <= self._confirmed_ticket or now >= self._held_answers[0][1]
        ):
            free += self._held_answers.popleft()[2]
        return free
