"""Limits how many bind threads gangs may occupy, fairly among namespaces.

Each member of a gang, except the last, waits in a thread of the extender. One tenant could occupy all threads, with
gangs whose last member never comes. So a namespace that got threads lately lets others go first, and while another
namespace is short of threads, no hold lasts longer than the setting says.
"""

from typing import Final

from cardwise.core.gangs.gangstate import Gang

_SHORT_SECONDS: Final = 5.0  # for so long a refused gang counts as short of threads; it asks again before that
_MOST_NAMESPACES: Final = 1000  # remembered


class BindTurns:
    """`most`: the number of threads. Not thread-safe: the state locks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._given: dict[str, float] = {}  # when a namespace got threads, the last one at the end
        self._short: dict[str, tuple[str, float]] = {}  # by gang: namespace, and when it was refused threads

    def refusal(self, gang: Gang, taken: int, now: float) -> str:
        """Why the gang's members may not wait in bind now, or "". `taken`: threads that present holds may occupy."""
        waiting = len(gang.wanted()) - 1
        if waiting > self._most:
            return f"{waiting} pods must wait in bind, and the extender has threads for {self._most} of them"
        if taken + waiting > self._most:
            self._short[gang.key] = gang.namespace, now
            return "other gangs are being bound"
        if waiting and self._comes_later(gang.namespace, now):
            return "a gang of another namespace waits for the extender's threads, and comes first"
        self._short.pop(gang.key, None)
        return ""

    def given(self, gang: Gang, now: float) -> None:
        """The members of the gang may wait from now on."""
        self._given.pop(gang.namespace, None)
        self._given[gang.namespace] = now
        if len(self._given) > _MOST_NAMESPACES:
            del self._given[next(iter(self._given))]

    def others_short(self, namespace: str, now: float) -> bool:
        """Whether gangs of other namespaces are short of threads."""
        self._short = {key: one for key, one in self._short.items() if now - one[1] < _SHORT_SECONDS}
        return any(other != namespace for other, _ in self._short.values())

    def _comes_later(self, namespace: str, now: float) -> bool:
        if not self.others_short(namespace, now):
            return False
        mine = self._given.get(namespace, float("-inf"))
        return any(self._given.get(other, float("-inf")) < mine for other, _ in self._short.values())
