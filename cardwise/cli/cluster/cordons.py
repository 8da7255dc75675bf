"""Cordons and uncordons the cards that command arguments name.

The cordon is in the spec of the card's ExtendedResource. The extender places no pod on a cordoned card, and the device
plugin keeps the cordon (docs/reference/cards.md).
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

import click
import msgspec

from cardwise.cli import options
from cardwise.core.api import classes, names
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.shellcommand import command
from cardwise.core.values.timestamps import format_timestamp, parse_timestamp
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.objects.extendedresources import Cordon, ExtendedResource

_F = TypeVar("_F", bound=Callable[..., Any])

_DEFRAG_REASON = "cardwise defrag is moving its pods"
_CORDON_ABANDONED_AFTER = timedelta(
    minutes=30
)  # a defrag that still runs has uncordoned the card within this time, unless its pods start slowly
_MAX_NAMED_CARDS = 5  # cards named in the message about an ambiguous prefix
_MAX_REASON, _MAX_USER_NAME = 1024, 253  # maximum lengths of the CRD: characters of a reason, characters of a user name
_MAX_COMPLETIONS, _COMPLETION_SECONDS = 500, 2.0  # maximum number of cards for a shell, and its maximum wait for them
_MAX_CONFLICTS = 5  # a change of a card fails after this number of conflicts with other writers
_NO_CORDON: Json = {"unschedulable": None, "cordon": None}
_SELF_REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}


_RESOURCE_LIST = wire.ListOf[ExtendedResource]


def _complete_card(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a card in a shell: NODE/INDEX of the first matching cards; [] if they cannot be read quickly."""
    node = incomplete.partition("/")[0] if "/" in incomplete else ""
    try:
        client = options.load_client(context)
        query = paths.label_query(names.NODE_LABEL, node) if node else None
        listed_cards = client.list_as(
            paths.extendedresources(), _RESOURCE_LIST, query, _MAX_COMPLETIONS, timeout=_COMPLETION_SECONDS
        )
        cards = list(islice(listed_cards, _MAX_COMPLETIONS))
    except (errors.KubeError, errors.KubeConfigError):
        return []
    positions = (f"{card.spec.node}/{card.spec.index}" for card in cards if card.spec.kind == classes.GPU_KIND)
    return sorted(position for position in positions if position.startswith(incomplete) and position.isprintable())


def card_argument(function: _F) -> _F:
    """Add the argument `card`, with its shell completion."""
    return click.argument("card", shell_complete=_complete_card)(function)


def cordon_card(client: KubeClient, card: ExtendedResource, reason: str, *, dry_run: bool = False) -> bool:
    """Cordon a card. Returns False if it is cordoned already and no new reason is given.

    A cordon by a defrag is always replaced: that defrag, or the next one, would remove it.

    Raises `KubeError`.
    """

    def may_replace(current: ExtendedResource) -> bool:
        return bool(reason) or not current.spec.unschedulable or is_cordoned_by_defrag(current)

    return may_replace(card) and write_cordon(client, card, new_cordon(client, reason), may_replace, dry_run=dry_run)


def new_cordon(client: KubeClient, reason: str) -> Cordon:
    """A cordon by the user, with the present time."""
    return Cordon(reason[:_MAX_REASON], _own_user_name(client) or "", format_timestamp(client.server_time()))


def new_defrag_cordon(client: KubeClient) -> Cordon:
    """A cordon that lasts while `cardwise defrag` moves pods."""
    return new_cordon(client, _DEFRAG_REASON)


def is_cordoned_by_defrag(card: ExtendedResource) -> bool:
    """Whether a defrag has cordoned the card. The defrag still runs, or was killed before it uncordoned the card."""
    return card.spec.unschedulable and card.spec.cordon.reason == _DEFRAG_REASON


def abandoned_defrag_cordons(cards: Iterable[ExtendedResource], now: datetime) -> list[ExtendedResource]:
    """The cards whose cordon by a defrag is so old that the defrag was probably killed."""
    return [
        card
        for card in cards
        if is_cordoned_by_defrag(card) and _is_older(card.spec.cordon.time, now - _CORDON_ABANDONED_AFTER)
    ]


def _is_older(timestamp: str, limit: datetime) -> bool:
    time = parse_timestamp(timestamp)
    return time is None or time < limit


def write_cordon(
    client: KubeClient,
    card: ExtendedResource,
    cordon: Cordon,
    may_replace: Callable[[ExtendedResource], bool],
    *,
    dry_run: bool = False,
) -> bool:
    """Cordon the card if `may_replace` returns True for the card's current state. Returns whether it did.

    Raises `KubeError`.
    """
    spec = {"unschedulable": True, "cordon": msgspec.structs.asdict(cordon)}
    return _write_spec(client, card, spec, may_replace, {"dryRun": "All"} if dry_run else None) is not None


def remove_cordon(client: KubeClient, card: ExtendedResource, cordon: Cordon) -> bool:
    """Uncordon the card if it has exactly this cordon. Returns whether the card had this cordon. Raises `KubeError`."""
    return (
        _write_spec(client, card, _NO_CORDON, lambda now: now.spec.unschedulable and now.spec.cordon == cordon)
        is not None
    )


def _write_spec(
    client: KubeClient,
    card: ExtendedResource,
    spec: Json,
    may_change: Callable[[ExtendedResource], bool],
    query: dict[str, str] | None = None,
) -> Json | None:
    """Read the card, and write `spec` if `may_change` allows it. Returns the written object, or None.

    The write has the resourceVersion of the read. So the API server refuses the write if the card was changed since the
    read, by a user (a cordon) or a component (a status); then the card is read again.
    """
    path = paths.extendedresources(card.metadata.name)
    conflicts = 0
    while True:
        manifest = client.get(path)
        if not may_change(msgspec.convert(manifest, ExtendedResource)):
            return None
        metadata = {"resourceVersion": manifest["metadata"]["resourceVersion"]}
        try:
            return client.patch(path, {"metadata": metadata, "spec": spec}, query=query)
        except errors.Conflict:
            conflicts += 1
            if conflicts == _MAX_CONFLICTS:
                raise


def uncordon_card(client: KubeClient, card: ExtendedResource) -> None:
    """Uncordon a card. Raises `KubeError`."""
    client.patch(paths.extendedresources(card.metadata.name), {"spec": _NO_CORDON})


def uncordon_command(card: ExtendedResource) -> str:
    """The command that uncordons the card."""
    return command("cardwise uncordon {node}/{index}", node=card.spec.node, index=card.spec.index)


def author_suffix(card: ExtendedResource) -> str:
    """The user and time of the cordon, such as " by anna at TIME", with a leading space; empty if unknown."""
    cordon = card.spec.cordon
    author = f" by {wording.quote_unless_name(cordon.user)}" if cordon.user else ""
    return author + (f" at {wording.quote_unless_name(cordon.time)}" if cordon.time else "")


def describe_card(card: ExtendedResource) -> str:
    """The name of a card or device in messages."""
    spec = card.spec
    noun = "GPU" if spec.kind == classes.GPU_KIND else f"{wording.quote_unless_name(spec.kind)} device"
    return f"{noun} {spec.index} of node {spec.node} ({wording.quote_unless_name(spec.uuid)})"


def find_card(client: KubeClient, text: str) -> ExtendedResource:
    """Find the card or device that an argument names. Raises `KubeError`."""
    node, separator, index = text.rpartition("/")
    if separator:
        return _find_card_by_index(client, node, index)
    name = names.extended_resource_name(text)
    cards = list(_list_resources(client))
    matching_cards = [card for card in cards if card.metadata.name == name]
    matching_cards = matching_cards or [card for card in cards if _has_prefix(card.metadata.name, name)]
    if not matching_cards:
        raise click.ClickException(f"no GPU has a UUID that begins with {text!r}; `cardwise top` shows them")
    if len(matching_cards) > 1:
        descriptions = wording.enumerate_first([describe_card(card) for card in matching_cards], _MAX_NAMED_CARDS)
        raise click.ClickException(f"{text!r} matches several UUIDs: {descriptions}; give more characters")
    return matching_cards[0]


def _find_card_by_index(client: KubeClient, node: str, index: str) -> ExtendedResource:
    """Find a card by its node and index. Devices of other kinds can be named only by their UUIDs."""
    cards_of_node = _list_resources(client, paths.label_query(names.NODE_LABEL, node))
    # The query is by label, but the card of another node can have the same label.
    cards = {
        str(card.spec.index): card
        for card in cards_of_node
        if card.spec.kind == classes.GPU_KIND and card.spec.node == node
    }
    if not cards:
        raise click.ClickException(f"node {node!r} has no GPU that Cardwise shares")
    if index not in cards:
        indices = ", ".join(sorted(cards, key=int))
        raise click.ClickException(f"node {node!r} has no GPU {index!r}; its GPUs are {indices}")
    return cards[index]


def _list_resources(client: KubeClient, query: dict[str, str] | None = None) -> Iterator[ExtendedResource]:
    return client.list_as(paths.extendedresources(), _RESOURCE_LIST, query)


def _has_prefix(name: str, prefix: str) -> bool:
    """Whether a UUID has the prefix. The prefix may omit the "GPU-" with which UUIDs of cards begin."""
    return bool(prefix) and (name.startswith(prefix) or name.partition("-")[2].startswith(prefix))


def _own_user_name(client: KubeClient) -> str | None:
    """The client's user name, from the API server; None if unknown."""
    try:
        review = client.create(paths.selfsubjectreviews(), _SELF_REVIEW)
    except errors.KubeError:
        return None
    user_name = ((review.get("status") or {}).get("userInfo") or {}).get("username")
    return str(user_name)[:_MAX_USER_NAME] if user_name else None
