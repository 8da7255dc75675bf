"""The amounts of the share agent: limits, LimitRanges, and the unchanged QoS class."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cardwise.core.api import names, request
from tests import build
from tests.webhook.reviews import Known
from tests.webhook.sharing import (
    MPS,
    SETTINGS,
    Json,
    admitted,
    agent,
    agents,
    decision_on,
    sidecar,
    with_resources,
)
from webhook.cluster import limitranges
from webhook.pods.context import WebhookSettings


def known(*limits: Json) -> Known:
    """The bounds of these LimitRanges."""
    return replace(MPS, ranges={"default": limitranges.parse({"spec": {"limits": list(limits)}})})


def cpu_memory(cpu: str, memory: str) -> Json:
    return {"cpu": cpu, "memory": memory}


def test_settings_reach_the_agent() -> None:
    chosen = replace(SETTINGS.share_agent, user=0, image="mine")
    pod = build.pod(containers=[with_resources(build.container(gpu_mem=1), limits=cpu_memory("1", "1Gi"))])
    container = agent(admitted(pod, settings=WebhookSettings(share_agent=chosen))[0])
    assert "runAsUser" not in container["securityContext"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["image"] == "mine"
    assert container["resources"]["limits"] == {"cpu": "50m", "memory": "64Mi", names.SHARE: "1"}


FULL = {"limits": cpu_memory("50m", "64Mi"), "requests": cpu_memory("50m", "64Mi")}


@pytest.mark.parametrize(
    ("containers", "named"),
    [
        pytest.param([{}], {}, id="BestEffort"),
        pytest.param([{"limits": cpu_memory("1", "1Gi"), "requests": cpu_memory("1", "1Gi")}], FULL, id="Guaranteed"),
        pytest.param([{"limits": cpu_memory("1", "1Gi")}], FULL, id="requests follow from limits"),
        pytest.param([{"requests": {"cpu": "1"}}], {"requests": {"cpu": "50m"}}, id="Burstable"),
        pytest.param([{"requests": {"cpu": "1"}}, {}], {}, id="one does without"),
        pytest.param(
            [
                {"limits": {"memory": "1Gi"}, "requests": cpu_memory("1", "1Gi")},
                {"limits": {"memory": "1Gi", "cpu": "2"}},
            ],
            {"limits": {"memory": "64Mi"}, "requests": cpu_memory("50m", "64Mi")},
            id="only what all name",
        ),
        pytest.param([{"requests": {"cpu": "0"}}], {"requests": {"cpu": "0"}}, id="zero is BestEffort still"),
    ],
)
@pytest.mark.parametrize("place", ["containers", "sidecars"])
def test_agent_sets_amounts_that_all_containers_set(containers: list[Json], named: Json, place: str) -> None:
    first, *others = containers
    rest = [with_resources(build.container(f"c{i}"), **kinds) for i, kinds in enumerate(others)]
    main = with_resources(build.container(gpu_mem=1), **first)
    sidecars = [sidecar(amounts) for amounts in rest]
    pod = build.pod(containers=[main, *rest]) if place == "containers" else build.pod(containers=[main], init=sidecars)
    resources = deepcopy(agent(admitted(pod)[0])["resources"])
    assert resources["limits"].pop(names.SHARE) == "1"
    assert {kind: amounts for kind, amounts in resources.items() if amounts} == named


def test_an_ordinary_init_container_takes_no_request_away() -> None:
    """Otherwise a HorizontalPodAutoscaler that worked without the agent would report `missing request for cpu`."""
    main = with_resources(build.container(gpu_mem=1), requests=cpu_memory("1", "1Gi"))
    after, _ = admitted(build.pod(init=[build.container("loads")], containers=[main]))
    assert agent(after)["resources"]["requests"] == cpu_memory("50m", "64Mi")
    raised, _ = admitted(
        build.pod(init=[build.container("loads")], containers=[main]), known(item("Container", min={"cpu": "60m"}))
    )
    assert agent(raised)["resources"]["requests"] == cpu_memory("60m", "64Mi"), "a LimitRange holds for it too"


def test_agent_sets_no_amounts_with_pod_level_resources() -> None:
    pod = build.pod(containers=[with_resources(build.container(gpu_mem=1), limits=cpu_memory("1", "1Gi"))])
    pod["spec"]["resources"] = {"limits": cpu_memory("2", "2Gi")}
    after, _ = admitted(pod)
    assert agent(after)["resources"] == {"limits": {names.SHARE: "1"}}
    # Amounts that a LimitRange adds later stay; otherwise the next call of the webhook would remove them.
    agent(after)["resources"]["limits"]["cpu"] = "9m"
    assert agent(admitted(after)[0])["resources"]["limits"]["cpu"] == "9m"


GUARANTEED = build.pod(containers=[with_resources(build.container(gpu_mem=1000), limits=cpu_memory("1", "1Gi"))])


def item(kind: str, **bounds: Json) -> Json:
    return {"type": kind, **bounds}


def test_limit_range_minimum_raises_the_agents_amounts() -> None:
    ranges = known(
        item("Container", min={"cpu": "60m", "memory": "1Mi", "ephemeral-storage": "1Gi"}),
        item("Container", min={"cpu": "0.1"}),
        item("Pod", min={"cpu": "1"}),
    )
    resources = agent(admitted(GUARANTEED, ranges)[0])["resources"]
    assert resources == {
        "limits": {"cpu": "0.1", "memory": "64Mi", names.SHARE: "1"},
        "requests": cpu_memory("0.1", "64Mi"),
    }
    assert agent(admitted(build.pod(gpu_mem=1), ranges)[0])["resources"] == {"limits": {names.SHARE: "1"}}


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (item("Pod", max={"cpu": "1"}), "a LimitRange allows a pod 1 of cpu at most"),
        (item("Pod", max={"memory": "1087Mi"}), "a LimitRange allows a pod 1087Mi of memory at most"),
        (item("Pod", max={"memory": "1088Mi"}), ""),
        (item("Container", max={"cpu": "40m"}), "a LimitRange allows a container 40m of cpu at most"),
        (item("Container", max={"cpu": "50m"}), ""),
    ],
)
def test_agent_is_left_out_if_a_limit_range_would_refuse_the_pod(bounds: Json, says: str) -> None:
    after, warnings = admitted(GUARANTEED, known(bounds))
    assert bool(agents(after)) is not bool(says)
    assert [says in text for text in warnings] == ([True] if says else [])
    copy, _ = admitted(GUARANTEED)
    assert bool(agents(admitted(copy, known(bounds))[0])) is not bool(says)


def test_copied_agents_amounts_above_a_limit_range_are_removed_with_pod_level_resources() -> None:
    pod = build.pod(gpu_mem=1000)
    pod["spec"]["resources"] = {"limits": cpu_memory("2", "2Gi")}
    copy, _ = admitted(pod)
    agent(copy)["resources"]["limits"]["cpu"] = "200m"
    after, warnings = admitted(copy, known(item("Container", max={"cpu": "100m"})))
    assert (agent(after)["resources"], warnings) == ({"limits": {names.SHARE: "1"}}, ())
    assert agent(admitted(copy, known(item("Container", max={"cpu": "1"})))[0])["resources"]["limits"]["cpu"] == "200m"


@pytest.mark.parametrize("field", ["default", "defaultRequest"])
def test_defaults_that_kubernetes_writes_into_the_agent_later_count_with_pod_level_resources(field: str) -> None:
    """Otherwise the first call adds the agent, and the second call, after the LimitRange's default, removes it."""
    main = with_resources(build.container(gpu_mem=1000), limits=cpu_memory("900m", "1Gi"))
    pod = build.pod(containers=[main])
    pod["spec"]["resources"] = {"limits": cpu_memory("2", "2Gi")}
    full = known(item("Pod", max={"cpu": "1"}), item("Container", **{field: {"cpu": "200m"}}))
    after, warnings = admitted(pod, full)
    assert agents(after) == []
    assert ["a LimitRange allows a pod 1 of cpu at most" in text for text in warnings] == [True]
    copy, _ = admitted(pod)
    agent(copy)["resources"]["limits"]["cpu"] = "300m"
    assert agents(admitted(copy, full)[0]) == []
    assert agents(admitted(pod, known(item("Pod", max={"cpu": "2"}), item("Container", **{field: {"cpu": "200m"}})))[0])


def test_pod_amounts_are_summed_as_by_limit_ranges() -> None:
    """An ordinary init container runs beside the sidecars before it, and before all containers."""
    big = with_resources(build.container("big"), limits=cpu_memory("3", "1Gi"))
    main = with_resources(build.container(gpu_mem=1), limits=cpu_memory("1", "1Gi"))
    first = build.pod(init=[big], containers=[main])
    assert agents(admitted(first, known(item("Pod", max={"cpu": "3"})))[0])
    gpu = sidecar(with_resources(build.container("gpu", gpu_mem=1), limits=cpu_memory("1", "1Gi")))
    behind = build.pod(init=[gpu, big], containers=[main])
    assert agents(admitted(behind, known(item("Pod", max={"cpu": "4"})))[0]) == []
    assert agents(admitted(behind, known(item("Pod", max={"cpu": "4050m"})))[0])


RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        kind: st.fixed_dictionaries({}, optional={"cpu": st.sampled_from(["0", "1"]), "memory": st.just("1Gi")})
        for kind in ("limits", "requests")
    },
)


def filled(pod: Json, container_range: Json) -> Json:
    """The pod after Kubernetes has written the defaults of the LimitRange into all its containers."""
    stored = deepcopy(pod)
    for container in request.containers(stored):
        resources = container.spec.setdefault("resources", {})
        limits = dict(resources.get("limits") or {})
        requests = {name: text for name, text in limits.items() if name in ("cpu", "memory")}
        requests = container_range.get("defaultRequest", {}) | requests | (resources.get("requests") or {})
        filled_lists = {"limits": container_range.get("default", {}) | limits, "requests": requests}
        resources |= {kind: amounts for kind, amounts in filled_lists.items() if amounts}
    return stored


_CONTAINER_RANGES = st.builds(
    lambda default, default_request, maximum: item("Container", **default, **default_request, **maximum),
    st.sampled_from([{}, {"default": {"cpu": "200m"}}, {"default": {"cpu": "200m", "memory": "100Mi"}}]),
    st.sampled_from([{}, {"defaultRequest": {"cpu": "100m"}}]),
    st.sampled_from([{}, {"max": {"cpu": "250m"}}]),
)
_POD_RANGES = st.sampled_from(["1", "1050m", "1200m", "2"]).map(lambda cpu: item("Pod", max={"cpu": cpu}))


@given(RESOURCES, st.none() | RESOURCES, st.booleans(), _CONTAINER_RANGES, _POD_RANGES)
def test_limit_ranges_have_the_same_effect_on_the_agent_in_each_call(
    of_container: Json, of_copied_agent: Json | None, pod_level: bool, container_range: Json, pod_range: Json
) -> None:
    """Kubernetes writes the defaults of LimitRanges before each call of the webhook."""
    pod = build.pod(containers=[with_resources(build.container(gpu_mem=1000), **of_container)])
    if of_copied_agent is not None:
        pod, _ = admitted(pod)
        agent(pod)["resources"] = of_copied_agent | {"limits": of_copied_agent.get("limits", {}) | {names.SHARE: "1"}}
    if pod_level:
        pod["spec"]["resources"] = {"limits": cpu_memory("2", "2Gi")}
    ranges = known(container_range, pod_range)
    once, _ = admitted(filled(pod, container_range), ranges)
    assert decision_on(filled(once, container_range), ranges).patch == []


def qos_class(pod: Json) -> str:
    """The QoS class as in k8s.io/kubernetes pkg/apis/core/v1/helper/qos, with missing requests set to the limits."""
    seen = set()
    guaranteed = True
    for container in request.containers(pod):
        limits = {k: v for k, v in container.spec["resources"].get("limits", {}).items() if k in ("cpu", "memory")}
        requests = limits | container.spec["resources"].get("requests", {})
        requests = {k: v for k, v in requests.items() if k in ("cpu", "memory")}
        limits, requests = ({k: v for k, v in amounts.items() if v != "0"} for amounts in (limits, requests))
        seen |= {*limits, *requests}
        guaranteed &= set(limits) == {"cpu", "memory"} and limits == requests
    return "BestEffort" if not seen else "Guaranteed" if guaranteed else "Burstable"


def missing_requests(pod: Json) -> set[str]:
    """Containers that a HorizontalPodAutoscaler cannot count: k8s.io/kubernetes
    pkg/controller/podautoscaler/replica_calculator calculatePodRequestsFromContainers sums containers and sidecars, and
    fails where one of them names no request.
    """
    running = [container.spec for container in request.containers(pod) if not container.ordinary_init]
    kinds = [
        container["resources"].get("limits", {}) | container["resources"].get("requests", {}) for container in running
    ]
    return {name for name in ("cpu", "memory") if not all(name in named for named in kinds)}


def unnamed(pod: Json) -> set[tuple[str, str]]:
    """Containers for which a ResourceQuota on the resource would refuse the pod: every container must name it."""
    names_missing = set()
    for container in request.containers(pod):
        limits = container.spec["resources"].get("limits", {})
        kinds = {"limits": limits, "requests": limits | container.spec["resources"].get("requests", {})}
        names_missing |= {
            (kind, name) for kind, named in kinds.items() for name in ("cpu", "memory") if name not in named
        }
    return names_missing


@example([{"requests": {"cpu": "1", "memory": "1Gi"}}], [({}, False)])
@given(
    st.lists(RESOURCES, min_size=1, max_size=3), st.lists(st.tuples(RESOURCES, st.booleans()), max_size=3)
)  # fmt: skip
def test_agent_changes_neither_qos_nor_autoscaling_nor_quotas(
    containers: list[Json], init: list[tuple[Json, bool]]
) -> None:
    first, *others = (
        with_resources(build.container(f"c{i}", **({} if i else {"gpu_mem": 1})), **kinds)
        for i, kinds in enumerate(containers)
    )
    sidecars = [
        (sidecar if stays else dict)(with_resources(build.container(f"i{i}"), **kinds))
        for i, (kinds, stays) in enumerate(init)
    ]
    before = build.pod(containers=[first, *others], init=sidecars)
    after, _ = admitted(before)
    assert agents(after)
    assert qos_class(after) == qos_class(before)
    assert missing_requests(after) == missing_requests(before)
    assert unnamed(after) == unnamed(before)
