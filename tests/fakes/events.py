"""Events as they were recorded, in place of an `EventRecorder`."""

from typing import NamedTuple

from cardwise.kube.events import EventKind, ObjectRef


class Event(NamedTuple):
    """As it was recorded."""

    about: ObjectRef
    reason: str
    message: str
    type: EventKind


class Events:
    """All of them, the first one first."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def record(self, regarding: ObjectRef, reason: str, message: str, type: EventKind = "Normal") -> None:  # noqa: A002
        self.all.append(Event(regarding, reason, message, type))

    def stop(self) -> None:
        pass

    def summaries(self) -> list[tuple[str, str, EventKind]]:
        """The name of the object, the reason and the type of each."""
        return [(event.about.name, event.reason, event.type) for event in self.all]

    def with_reason(self, reason: str) -> list[Event]:
        return [event for event in self.all if event.reason == reason]

    def messages(self, reason: str) -> list[str]:
        return [event.message for event in self.with_reason(reason)]
