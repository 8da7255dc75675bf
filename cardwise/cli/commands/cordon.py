"""`cardwise cordon` and `uncordon`: take a GPU out of use, or put it back into use. Running pods stay."""

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import cordons
from cardwise.core.values import wording
from cardwise.kube.objects.extendedresources import ExtendedResource


@click.command()
@options.cluster
@click.option("--reason", default="", help="Why the GPU is cordoned; shown to other administrators.")
@cordons.card_argument
def cordon(reason: str, card: str) -> None:
    """Cordon a GPU: new pods do not get it, running pods stay. CARD: a UUID, a prefix of one, or NODE/INDEX."""
    client = options.load_client()
    resource = cordons.find_card(client, card)
    is_changed = cordons.cordon_card(client, resource, reason)
    console.print_text(
        f"{cordons.describe_card(resource)} cordoned"
        if is_changed
        else f"{cordons.describe_card(resource)} already cordoned{_describe_cordon(resource)}"
    )


@click.command()
@options.cluster
@cordons.card_argument
def uncordon(card: str) -> None:
    """Uncordon a GPU; pending pods are tried again. CARD: a UUID, a prefix of one, or NODE/INDEX."""
    client = options.load_client()
    resource = cordons.find_card(client, card)
    if not resource.spec.unschedulable:
        console.print_text(f"{cordons.describe_card(resource)} already uncordoned")
        return
    cordons.uncordon_card(client, resource)
    console.print_text(f"{cordons.describe_card(resource)} uncordoned")


def _describe_cordon(card: ExtendedResource) -> str:
    reason = wording.sanitize_message(card.spec.cordon.reason)
    return cordons.author_suffix(card) + (f": {reason}" if reason else "")
