"""GPUQuota: the amounts of GPUs that a namespace may hold, and how much of them each share uses.

This module only computes. The ledger has the amounts that pods hold, and `kinds` has the kinds of cards that an entry
covers.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from cardwise.core.api import names
from cardwise.core.api.assignment import CardUse
from cardwise.core.values import amounts
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import InvalidQuantity
from cardwise.core.values.wording import quote_text, sanitize_message

_MAX_TITLE_BYTES = 80  # bytes of an entry's title; the longest model name of NVIDIA has 40

# The amounts that a quota limits. For each: its name in `Charge`, `QuotaEntry` and `Headroom`, its field in a GPUQuota,
# and its unit in messages.
AMOUNT_FIELDS = (("shares", "shares", "shares"), ("memory", "memoryMiB", "MiB"), ("cards", "gpus", "whole GPUs"))

# The keys of a ResourceQuota that count shares and whole cards. Shares do not count under the key of whole cards, and
# whole cards do not count under the key of shares.
SHARES_QUOTA_KEY = f"requests.{names.GPU_MEM}"
WHOLE_CARDS_QUOTA_KEY = f"requests.{names.WHOLE_GPU}"

_ENTRY_FIELDS = ("class", "model", *(field for _, field, _ in AMOUNT_FIELDS))
_SPEC_FIELDS = ("hard", "onExceed")
_MAX_AMOUNT = 2**53  # the largest integer up to which all JSON readers are exact
_AMOUNT_NOUNS = "one or more of shares, memoryMiB, gpus"


class Charge(NamedTuple):
    """The amounts that some shares use of a quota entry's limits.

    shares: their number; a whole card counts as a share.
    memory: their MiB.
    cards: the number of whole cards.
    """

    shares: int = 0
    memory: int = 0
    cards: int = 0

    def add(self, other: "Charge") -> "Charge":
        return Charge(self.shares + other.shares, self.memory + other.memory, self.cards + other.cards)

    def multiply(self, count: int) -> "Charge":
        return Charge(self.shares * count, self.memory * count, self.cards * count)

    def subtract(self, other: "Charge") -> "Charge":
        return Charge(self.shares - other.shares, self.memory - other.memory, self.cards - other.cards)


NO_CHARGE = Charge()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaEntry:
    """One entry of `spec.hard`.

    resource_class, model: select the cards that the entry covers; all cards if both are "".
    shares, memory, cards: the limits, as in `Charge`; None for no limit.
    """

    resource_class: str = ""
    model: str = ""
    shares: int | None = None
    memory: int | None = None
    cards: int | None = None

    def covers(self, classes: frozenset[str], model: str) -> bool:
        """Whether the entry covers a card of these classes and this model."""
        if self.resource_class:
            return self.resource_class in classes
        return not self.model or self.model == model


class Limit(NamedTuple):
    """One limit of a quota entry, for messages.

    field: its field in a GPUQuota.
    unit: its unit in messages.
    used, hard, requested: the amount in use, the limit, and the requested amount.
    """

    field: str
    unit: str
    used: int
    hard: int
    requested: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The amounts that a quota entry still allows; None for no limit. Negative if more is in use than the limit."""

    entry: QuotaEntry
    shares: int | None
    memory: int | None
    cards: int | None

    def has_room_for(self, charge: Charge) -> bool:
        """Whether the charge fits. Only amounts that the charge uses matter."""
        return (
            (self.shares is None or not charge.shares or charge.shares <= self.shares)
            and (self.memory is None or not charge.memory or charge.memory <= self.memory)
            and (self.cards is None or not charge.cards or charge.cards <= self.cards)
        )

    def exceeded_part(self) -> "Headroom | None":
        """The headroom of the amounts that are in use beyond their limits; None if there are no such amounts."""
        shares, memory, cards = (
            amount if amount is not None and amount < 0 else None for amount in (self.shares, self.memory, self.cards)
        )
        if shares is memory is cards is None:
            return None
        return Headroom(entry=self.entry, shares=shares, memory=memory, cards=cards)

    def subtract(self, charge: Charge) -> "Headroom":
        """The headroom after the charge."""
        return Headroom(
            entry=self.entry,
            shares=None if self.shares is None else self.shares - charge.shares,
            memory=None if self.memory is None else self.memory - charge.memory,
            cards=None if self.cards is None else self.cards - charge.cards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUQuota:
    """One GPUQuota.

    refuse: whether the webhook refuses pods that exceed the quota at their creation; if not, they stay pending.
    """

    namespace: str
    name: str
    entries: tuple[QuotaEntry, ...]
    refuse: bool = False


def headroom(entry: QuotaEntry, used: Charge) -> Headroom:
    """The amounts that the entry still allows when `used` is in use."""
    return Headroom(entry=entry, shares=entry.shares, memory=entry.memory, cards=entry.cards).subtract(used)


def charge_of_use(use: CardUse) -> Charge:
    """The charge of a pod's shares of one card."""
    return Charge(use.shares, use.mem, use.whole)


def min_charge_of_share(cards: int, mem: int, smallest: int) -> Charge:
    """The smallest possible charge of one container's cards.

    cards: the number of cards.
    mem: MiB over all of these cards; 0 for whole cards.
    smallest: MiB of the smallest card that the container could get; used for whole cards only.
    """
    return Charge(cards, mem, 0) if mem else Charge(cards, cards * smallest, cards)


def unlimited_amount_key(hard: Collection[str]) -> str | None:
    """The key that a namespace's ResourceQuotas lack: `WHOLE_CARDS_QUOTA_KEY` if they have only `SHARES_QUOTA_KEY`,
    and the other way round. Requests of this form then have no limit. None if the quotas have both keys or neither.

    hard: the keys of the ResourceQuotas.
    """
    if (SHARES_QUOTA_KEY in hard) == (WHOLE_CARDS_QUOTA_KEY in hard):
        return None
    return WHOLE_CARDS_QUOTA_KEY if SHARES_QUOTA_KEY in hard else SHARES_QUOTA_KEY


def counts_in_place_of(quota: GPUQuota, missing: str) -> bool:
    """Whether an entry of the quota for all cards limits the requests that ResourceQuotas leave uncounted.

    missing: the key that `unlimited_amount_key` returns.
    """
    amount = "cards" if missing == WHOLE_CARDS_QUOTA_KEY else "shares"
    general_entries = [entry for entry in quota.entries if not (entry.resource_class or entry.model)]
    return any(entry.memory is not None or getattr(entry, amount) is not None for entry in general_entries)


def sum_charges(charges: Iterable[Charge]) -> Charge:
    """The sum of charges."""
    shares = memory = cards = 0
    for part in charges:
        shares, memory, cards = shares + part.shares, memory + part.memory, cards + part.cards
    return Charge(shares, memory, cards)


def parse(manifest: Mapping[str, Any]) -> GPUQuota:
    """A GPUQuota object from its decoded JSON. Raises InvalidRequest."""
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec")
    if not isinstance(spec, Mapping):
        raise InvalidRequest("spec", "is missing", "write spec.hard, a list of limits")
    for name in spec:
        if name not in _SPEC_FIELDS:
            raise InvalidRequest(f"spec.{name}", "is not a field of a GPUQuota", f"write {' and '.join(_SPEC_FIELDS)}")
    hard = spec.get("hard")
    if not isinstance(hard, list) or not hard:
        raise InvalidRequest("spec.hard", "limits nothing", f"write a list of entries, each with {_AMOUNT_NOUNS}")
    on_exceed = spec.get("onExceed", "Wait")
    if on_exceed not in ("Wait", "Refuse"):
        raise InvalidRequest("spec.onExceed", f"{quote_text(on_exceed)} is not known", "write Wait or Refuse")
    entries: dict[tuple[str, str], QuotaEntry] = {}
    for i, fields in enumerate(hard):
        entry = _parse_entry(fields, f"spec.hard[{i}]")
        selects = (entry.resource_class, entry.model)
        if selects in entries:
            _raise_duplicate_entry(entry, f"spec.hard[{i}]", list(entries).index(selects))
        entries[selects] = entry
    return GPUQuota(
        namespace=metadata.get("namespace") or "",
        name=metadata.get("name") or "",
        entries=tuple(entries.values()),
        refuse=on_exceed == "Refuse",
    )


def to_fields(amounts: Charge | QuotaEntry) -> dict[str, int]:
    """Amounts or limits as fields of a GPUQuota. Limits that are None are left out."""
    fields = ((field, getattr(amounts, name)) for name, field, _ in AMOUNT_FIELDS)
    return {field: amount for field, amount in fields if amount is not None}


def entry_selection(entry: QuotaEntry) -> dict[str, str]:
    """The entry's selection as fields of a GPUQuota; empty for all cards."""
    return {field: name for field, name in (("class", entry.resource_class), ("model", entry.model)) if name}


def entry_title(entry: QuotaEntry) -> str:
    """The GPUs of the entry, as text for users: a class, a model, or "all GPUs"."""
    return sanitize_message(entry.resource_class or entry.model, _MAX_TITLE_BYTES) or "all GPUs"


def entry_limits(entry: QuotaEntry, used: Charge, requested: Charge = NO_CHARGE) -> list[Limit]:
    """Each limit of the entry, with used and requested amounts."""
    return [
        Limit(field, unit, getattr(used, name), limit, getattr(requested, name))
        for name, field, unit in AMOUNT_FIELDS
        if (limit := getattr(entry, name)) is not None
    ]


def exceeded_limits(entry: QuotaEntry, used: Charge, requested: Charge) -> list[Limit]:
    """The limits that `used` and `requested` together would exceed. Only limits on requested amounts matter."""
    return [
        limit
        for limit in entry_limits(entry, used, requested)
        if limit.requested and limit.used + limit.requested > limit.hard
    ]


def used_by_status(manifest: Mapping[str, Any]) -> dict[tuple[str, str], Charge]:
    """The amounts in use according to the status of a GPUQuota, by class and model. Unreadable amounts count as 0."""
    status = manifest.get("status")
    lines = status.get("used") if isinstance(status, dict) else None
    return {
        (str(line.get("class") or ""), str(line.get("model") or "")): Charge(
            **{name: _as_count(line.get(field)) for name, field, _ in AMOUNT_FIELDS}
        )
        for line in (lines if isinstance(lines, list) else ())
        if isinstance(line, dict)
    }


def _as_count(decoded: object) -> int:
    return decoded if isinstance(decoded, int) else 0


def _raise_duplicate_entry(entry: QuotaEntry, field: str, first: int) -> NoReturn:
    subject = f"class {entry.resource_class}" if entry.resource_class else f"model {entry.model}"
    if not (entry.resource_class or entry.model):
        subject = "every GPU"
    name = "class" if entry.resource_class else "model" if entry.model else ""
    raise InvalidRequest(
        f"{field}.{name}" if name else field,
        f"{subject} is already limited by spec.hard[{first}]",
        "write all its limits in one entry",
    )


def _parse_entry(fields: object, field: str) -> QuotaEntry:
    if not isinstance(fields, Mapping):
        raise InvalidRequest(
            field, f"{quote_text(fields)} is not an entry", f"write class or model, and {_AMOUNT_NOUNS}"
        )
    for name in fields:
        if name not in _ENTRY_FIELDS:
            raise InvalidRequest(f"{field}.{name}", "is not a field of an entry", f"write {', '.join(_ENTRY_FIELDS)}")
    resource_class, model = _parse_text(fields, "class", field), _parse_text(fields, "model", field)
    if resource_class and model:
        raise InvalidRequest(f"{field}.model", "the entry also names a class", "write class or model, not both")
    entry = QuotaEntry(
        resource_class=resource_class or "",
        model=model or "",
        shares=_parse_count(fields, "shares", field),
        memory=_parse_memory(fields, field),
        cards=_parse_count(fields, "gpus", field),
    )
    if entry.shares is None and entry.memory is None and entry.cards is None:
        raise InvalidRequest(field, "limits nothing", f"write {_AMOUNT_NOUNS}")
    return entry


def _parse_text(fields: Mapping[str, Any], name: str, field: str) -> str | None:
    text = fields.get(name)
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(
            f"{field}.{name}", f"{quote_text(text)} is not a name", f"write a {name}, or leave it out for every GPU"
        )
    return text


def _parse_count(fields: Mapping[str, Any], name: str, field: str) -> int | None:
    number = fields.get(name)
    if number is None:
        return None
    if type(number) is not int or not 0 <= number <= _MAX_AMOUNT:
        raise InvalidRequest(
            f"{field}.{name}", f"{quote_text(number)} is out of range", "write a whole number, 0 or more"
        )
    return number


def _parse_memory(fields: Mapping[str, Any], field: str) -> int | None:
    amount = fields.get("memoryMiB")
    if amount is None:
        return None
    field = f"{field}.memoryMiB"
    remedy = "write MiB such as 65536, or a quantity such as 64Gi"
    if type(amount) is not int and not isinstance(amount, str):
        raise InvalidRequest(field, f"{quote_text(amount)} is not an amount of memory", remedy)
    try:
        return amounts.parse_memory_mib(amount)
    except InvalidQuantity as error:
        raise InvalidRequest(field, error.problem, remedy) from error
