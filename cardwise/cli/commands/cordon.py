"""`cardwise cordon` and `uncordon`: a card is taken out of use, or given back. What runs on it is left alone."""

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import cordons
from cardwise.core.values import wording
from cardwise.kube.wire import ExtendedResource


@click.command()
@options.cluster
@click.option("--reason", default="", help="Why the card is out of use; shown to other admins.")
@cordons.card_argument
def cordon(reason: str, card: str) -> None:
    """Take a card out of use: no new pod gets it, those on it stay. CARD: a UUID, its beginning, or NODE/INDEX."""
    client = options.client()
    found = cordons.find(client, card)
    done = cordons.mark(client, found, reason, options.clock())
    console.say(f"{cordons.title(found)} cordoned" if done else f"{cordons.title(found)} already cordoned{_why(found)}")


@click.command()
@options.cluster
@cordons.card_argument
def uncordon(card: str) -> None:
    """Give a cordoned card back; pods that wait are tried again. CARD: a UUID, its beginning, or NODE/INDEX."""
    client = options.client()
    found = cordons.find(client, card)
    if not found.spec.unschedulable:
        console.say(f"{cordons.title(found)} already uncordoned")
        return
    cordons.unmark(client, found)
    console.say(f"{cordons.title(found)} uncordoned")


def _why(card: ExtendedResource) -> str:
    reason = wording.message(card.spec.cordon.reason)
    return cordons.author(card) + (f": {reason}" if reason else "")
