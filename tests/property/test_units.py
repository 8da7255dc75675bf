"""What a number of gpu-mem means never depends on who reads it: once or twice through the webhook, with other webhooks
and LimitRanges in between, all readers of a pod agree on its MiB, and they are those that its namespace's unit says.
"""

from copy import deepcopy
from fractions import Fraction

import jsonpatch
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import assignment, names, request
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MAX_MIB, Percent, Unit
from extender.records.pod import Pod
from tests.examples import examples
from tests.webhook.reviews import Known, on_mutate
from webhook.pods.context import AgentSettings, WebhookSettings

# As the API server prints them, and what they are in MiB where bare numbers count MiB, and GiB.
AMOUNTS = {
    "2": (2, 2048), "16276": (16276, 16666624), "8k": (8000, 8192000), "1": (1, 1024), "80": (80, 81920),
    "8Gi": (8192, 8192), "8138Mi": (8138, 8138), "1Ti": (1048576, 1048576), "500m": (None, 512), "1500m": (None, 1536),
    "300m": (None, 308), "0": (None, None), "-2": (None, None), "1025Ki": (2, 2), "3G": (None, None),
}  # fmt: skip
UNITS = st.sampled_from(list(Unit))
AGENT = AgentSettings(image="registry.example/agent")


@st.composite
def pods(draw: st.DrawFn) -> tuple[Json, list[str | None]]:
    """A pod, and what each container says; None where a LimitRange gave it 4096."""
    containers, texts, given_by = [], [], []
    for i in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from([*AMOUNTS, None]))
        limits = {names.GPU_MEM: text or "4096"} | draw(st.sampled_from([{}, {"cpu": "1"}]))
        # The API server fills requests in; a user may write them in another spelling.
        containers.append({"name": f"c{i}", "resources": {"limits": limits, "requests": dict(limits)}})
        texts.append(text)
        if text is None:
            given_by.append(
                f"{names.GPU_MEM}, memory request for container c{i}; {names.GPU_MEM} limit for container c{i}"
            )
    notes = {names.LIMIT_RANGER: "LimitRanger plugin set: " + "; ".join(given_by)} if given_by else {}
    annotations = notes | draw(st.sampled_from([{}, {names.SHARE_AGENT: "always"}, {names.ISOLATION: "none"}]))
    spec = {"containers": containers}
    return {"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations}, "spec": spec}, texts


def through(pod: Json, settings: WebhookSettings) -> Json | None:
    """The pod behind /mutate; None where it is refused."""
    decision = on_mutate(pod, "pods", Known(), settings)
    return jsonpatch.JsonPatch(decision.patch).apply(deepcopy(pod)) if decision.allowed else None


def printed(pod: Json) -> Json:
    """As the API server has it: 8000 is 8k, and requests are there where limits are."""
    printed_pod = deepcopy(pod)
    for container in (*printed_pod["spec"]["containers"], *printed_pod["spec"].get("initContainers", ())):
        resources = container.get("resources") or {}
        for amounts in resources.values():
            amounts.update({name: f"{text[:-3]}k" for name, text in amounts.items() if text.endswith("000")})
        resources["requests"] = resources.get("limits", {}) | resources.get("requests", {})
    return printed_pod


def mib_by_all(pod: Json) -> set[tuple[int, ...]]:
    """By container, as each reader has it."""
    pod_request = request.parse_mutated(pod)
    assert pod_request is not None
    shares = {c.key: (CardShare(0, "GPU-0", c.mem, Percent(0), MAX_MIB),) for c in pod_request.containers}
    annotations = assignment.encode(Assignment(shares), assume_time_ns=1)
    held = assignment.decode(annotations)
    assert held is not None
    main = pod["spec"]["containers"]
    extender = Pod(pod).request
    assert extender is not None
    return {
        tuple(c.mem for c in pod_request.containers),
        tuple(c.mem for c in extender.containers),
        # The node, by what bind has written.
        tuple(int(annotations[names.LIMIT_MIB_OF + c.key]) for c in pod_request.containers),
        tuple(share.mem for part in held.containers.values() for share in part),
        # Kubernetes: scheduler and kubelet, ResourceQuota and LimitRange; and gpushare's own inspect. Plain numbers.
        *(
            tuple(int(quantity.parse_amount(c["resources"][kind][names.GPU_MEM]).number) for c in main)
            for kind in ("limits", "requests")
        ),
    }  # fmt: skip


@given(pods(), UNITS, st.lists(st.sampled_from(["again", "copy", "other webhook", "switch"]), max_size=3))
@settings(max_examples=examples(300, soak=5000))
def test_all_readers_agree_on_the_mib_that_the_namespace_says(
    drawn: tuple[Json, list[str | None]], unit: Unit, then: list[str]
) -> None:
    pod, texts = drawn
    expected = [4096 if text is None else AMOUNTS[text][unit is Unit.GIB] for text in texts]
    chosen = WebhookSettings(unit=unit, share_agent=AGENT)
    after = through(printed(pod), chosen)
    if None in expected:
        assert after is None, "what is no amount is refused"
        return
    assert after is not None
    after = printed(after)
    for step in then:
        other = WebhookSettings(unit=Unit.MIB if unit is Unit.GIB else Unit.GIB, share_agent=AGENT)
        if step == "copy":
            after = after | {"metadata": {"name": "copy", "annotations": {}}}
        elif step == "other webhook":
            after["spec"]["containers"].insert(0, {"name": f"x{len(after['spec']['containers'])}", "resources": {}})
        again = through(after, other if step == "switch" else chosen)
        assert again is not None
        after = printed(again)
    after["spec"]["containers"] = [c for c in after["spec"]["containers"] if not c["name"].startswith("x")]
    assert mib_by_all(after) == {tuple(expected)}


@given(st.sampled_from(sorted(AMOUNTS)), UNITS, st.booleans())
@settings(max_examples=examples(60, soak=500))
def test_a_quota_and_the_pods_that_it_counts_are_of_one_unit(text: str, unit: Unit, again: bool) -> None:
    chosen, key = WebhookSettings(unit=unit), f"requests.{names.GPU_MEM}"
    quota: Json = {"metadata": {"name": "q", "namespace": "n"}, "spec": {"hard": {key: text}}}

    def rewritten(manifest: Json) -> Json | None:
        decision = on_mutate(manifest, "resourcequotas", Known(), chosen)
        return jsonpatch.JsonPatch(decision.patch).apply(deepcopy(manifest)) if decision.allowed else None

    after = rewritten(quota)
    if after is not None and again:
        after = rewritten(after)
    expected = 0 if text == "0" else AMOUNTS[text][unit is Unit.GIB]
    assert (after is None) == (expected is None)
    if after is not None:
        assert quantity.parse_amount(after["spec"]["hard"][key]) == (Fraction(expected or 0), False)
