"""With which pods a pod shares its cards, by its annotation."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.sharing import FIELD, Tenant, check_share_with, tenant_of
from cardwise.core.values.invalid import InvalidRequest
from tests import build


def test_the_annotation_makes_a_pod_an_exclusive_tenant_of_its_namespace():
    pod = build.pod("a", uid="u", namespace="team", gpu_mem=8138, annotations={names.SHARE_WITH: "namespace"})
    assert request.parse(pod).tenant == Tenant("team", exclusive=True)
    assert request.parse(pod).mps_client.tenant == Tenant("team", exclusive=True)
    assert tenant_of({}, "team") == Tenant("team", exclusive=False)


def test_who_can_share():
    plain, exclusive = Tenant("a"), Tenant("a", exclusive=True)
    others = Tenant("b"), Tenant("b", exclusive=True)
    assert plain.can_share_with(exclusive)
    assert plain.can_share_with(others[0])
    assert not plain.can_share_with(others[1])
    assert not any(exclusive.can_share_with(other) for other in others)


@pytest.mark.parametrize("text", ["", "Namespace", "team", "none"])
def test_other_values_are_refused_with_field_and_remedy(text):
    with pytest.raises(InvalidRequest) as error:
        check_share_with(text)
    assert str(error.value) == (
        f"{FIELD}: {text!r} does not say with which pods a GPU is shared; write namespace, or leave it out"
    )
