"""The share agent in a copied or forged pod: it requests no GPU, whatever its manifest says.

The agent is written again later. If its former requests counted until then, they would be part of the pod's request in
the first call of the webhook, and not in the second.
"""

from cardwise.core.values import wording
from webhook.pods import agent
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview
from webhook.pods.resources import INTERNAL_RESOURCES
from webhook.templates.containers import amount_lists


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Remove the share agent's requests for cards and devices, including resources of other device plugins, and warn
    the author.

    Raises KubeError.
    """
    for i, container in enumerate(pod.containers):
        if not agent.is_own_agent(container):
            continue
        resources, translator = dict(container.spec.get("resources") or {}), context.translator
        stored_names = {
            name: translator.translate_container_name(name, amount)
            for _, amounts in amount_lists(resources)
            for name, amount in amounts.items()
        }
        removed_names = sorted(
            name for name, stored in stored_names.items() if "/" in stored and stored not in INTERNAL_RESOURCES
        )
        if removed_names:
            for kind, amounts in amount_lists(resources):
                resources[kind] = {name: amount for name, amount in amounts.items() if name not in removed_names}
            pod.put_resources(i, resources)
            pod.warnings.append(
                f"{container.path}.resources: removed {wording.enumerate_first(removed_names, 3)}; the share agent "
                "requests no GPU"
            )
