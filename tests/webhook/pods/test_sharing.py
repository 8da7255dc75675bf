"""With which pods a pod shares its GPUs: the namespace's demand, and demands that are refused."""

from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.api.sharing import FIELD
from cardwise.core.values.decoded import Json
from tests import build
from tests.webhook.reviews import Known, on_validate
from tests.webhook.sharing import SETTINGS, admitted, decision_on, judged, refused
from webhook.cluster import gpuquotas
from webhook.cluster.namespaces import Defaults

TEAM = Known(namespaces={"team": Defaults(share_with="namespace")})


def pod_with(share_with: str | None = None, **resources: Any) -> Json:
    annotations = {} if share_with is None else {names.SHARE_WITH: share_with}
    return build.pod(annotations=annotations, **(resources or {"gpu_mem": 8138}))


def share_with(pod: Json) -> str | None:
    stored: str | None = pod["metadata"]["annotations"].get(names.SHARE_WITH)
    return stored


def test_the_demand_of_the_namespace_is_written_into_its_pods() -> None:
    assert share_with(admitted(pod_with(), TEAM, namespace="team")[0]) == "namespace"
    assert share_with(admitted(pod_with(), TEAM)[0]) is None
    assert share_with(admitted(pod_with("namespace"), TEAM)[0]) == "namespace"
    plain = build.pod(containers=[build.container("a", share=1)])
    assert share_with(admitted(plain, TEAM, namespace="team")[0]) is None, "it has no GPU"


def test_other_values_are_refused() -> None:
    says = "'team-a' does not say with which pods a GPU is shared; write namespace, or leave it out"
    assert refused(pod_with("team-a")) == f"{FIELD}: {says}"
    known = Known(namespaces={"team": Defaults(share_with="team-a")})
    assert decision_on(pod_with(), known, namespace="team").message == (
        f"namespace team: metadata.annotations[{names.SHARE_WITH}]: {says}"
    )


def test_opting_out_of_defaults_does_not_lift_the_demand() -> None:
    pod = pod_with()
    pod["metadata"]["annotations"][names.DEFAULTS_OPT_OUT] = "disabled"
    assert share_with(admitted(pod, TEAM, namespace="team")[0]) == "namespace"


USAGE = gpuquotas.parse(build.gpu_quota({"shares": 9}))


@pytest.mark.parametrize(
    ("quota", "known"),
    [
        ("GPUQuota", Known(standings={"default": [USAGE], "team": [USAGE]}, namespaces=TEAM.namespaces)),
        (
            "ResourceQuota",
            Known(gpu_resource_quotas=frozenset({"default", "team"}), namespaces=TEAM.namespaces),
        ),
    ],
)
def test_where_a_quota_counts_requests_only_the_namespace_may_demand_it(quota: str, known: Known) -> None:
    stored, _ = admitted(pod_with("namespace"))
    says = f"the namespace has a {quota}, which does not count the rest of a GPU that others cannot use"
    remedy = "leave it out, or let an administrator set it on the namespace for all its pods"
    assert judged(stored, known).message == f"{FIELD}: {says}; {remedy}"
    assert on_validate(stored, "pods", known, SETTINGS, namespace="team").allowed
    assert judged(admitted(pod_with(), known)[0], known).allowed


def test_another_webhook_cannot_remove_the_demand_of_the_namespace() -> None:
    stored, _ = admitted(pod_with())
    decision = on_validate(stored, "pods", TEAM, SETTINGS, namespace="team")
    assert decision.message == f"{FIELD}: is missing, and the namespace requires it; write namespace"
