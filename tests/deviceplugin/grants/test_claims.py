"""NodePrepareResources: what a claim must say so that its pod gets its cards, and what the containers get."""

import copy

import pytest

from cardwise.core.api import names
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from deviceplugin.grants.granting import StartRefused
from deviceplugin.publish import shutdown
from tests.deviceplugin.claimedpods import ClaimedPod
from tests.deviceplugin.conftest import NODE, P100, PODS_HERE, Rig


@pytest.fixture
def rig(idle_rig: Rig) -> Rig:
    idle_rig.claims = True
    return idle_rig.start()


def refusal(pod: ClaimedPod) -> str:
    with pytest.raises(StartRefused) as caught:
        pod.prepare()
    return str(caught.value)


def test_each_container_gets_its_own_cards_and_limits(rig):
    pod = ClaimedPod(rig, shares={"first": [(0, 900)], "second": [(0, 1700), (1, 1700)], "plain": []})
    first, second = pod.prepare()
    assert (first.request, first.pool, first.devices) == ("first", NODE, ["gpu-0"])
    assert (second.request, second.pool, second.devices) == ("second", NODE, ["gpu-0", "gpu-1"])
    assert first.cdi_device == f"cardwise.dev/share={pod.name.uid}-first"
    assert (pod.nodes("first"), pod.nodes("second")) == (["/dev/nvidia0"], ["/dev/nvidia0", "/dev/nvidia1"])
    assert (pod.env("first")[names.ENV_LIMIT_MIB], pod.env("second")[names.ENV_LIMIT_MIB]) == ("900", "1700")
    assert rig.spec(pod.slot("plain")) is None
    assert rig.held_on_disk(0) == 2600
    rig.settle()
    annotations = rig.api.get(f"{PODS_HERE}/a")["metadata"]["annotations"]
    assert annotations[names.ASSIGNED] == "true"


def test_the_share_agent_has_a_request_without_a_share(rig):
    pod = ClaimedPod(rig, agent=True)
    agent, main = pod.prepare()
    assert (agent.request, agent.devices, main.devices) == ("cardwise-agent", ["gpu-0"], ["gpu-0"])
    assert pod.nodes("cardwise-agent") == []
    assert "CARDWISE_ASSIGNMENT" in "".join(pod.env("cardwise-agent"))


def test_whole_cards_are_given_whole(rig):
    pod = ClaimedPod(rig, shares={"main": [(0, P100), (1, P100)]}, whole=True)
    (main,) = pod.prepare()
    assert (main.devices, pod.nodes()) == (["gpu-0", "gpu-1"], ["/dev/nvidia0", "/dev/nvidia1"])
    assert [share.whole for grant in rig.agent.grants.list_grants() for share in grant.shares] == [True, True]
    assert "are still held by default/a" in refusal(ClaimedPod(rig, "b", {"main": [(1, 100)]}))


def test_it_may_be_called_again_at_any_time(rig):
    pod = ClaimedPod(rig)
    first = pod.prepare()
    spec = rig.spec(pod.slot())
    rig.stop()
    rig.start()
    assert pod.prepare() == first
    assert rig.spec(pod.slot()) == spec
    assert len(rig.agent.grants.list_grants()) == 1


def test_a_share_is_freed_when_pod_and_containers_are_gone_not_with_the_claim(rig):
    pod = ClaimedPod(rig, shares={"main": [(0, P100)]})
    pod.run()
    pod.delete_claim()
    rig.agent._on_claim_released(pod.name)
    rig.settle()
    assert rig.held_on_disk(0) == P100
    assert pod.nodes() == ["/dev/nvidia0"]
    rig.force_delete(pod.pod)
    rig.settle()
    assert [share["name"] for share in rig.status(0)["reported"]] == ["a"]
    late = ClaimedPod(rig, "late")
    assert "are still held by default/a" in refusal(late)
    rig.runtime.kill(pod.uid)
    late.prepare()
    rig.settle()
    assert rig.spec(pod.slot()) is None
    assert rig.held_on_disk(0) == 8138


def test_a_pod_by_slot_and_a_pod_by_claim_never_share_what_one_of_them_has(rig):
    rig.run(rig.bind("by-slot", [(0, 10_000)]))
    pod = ClaimedPod(rig)
    assert "10000 of 16276 MiB are still held by default/by-slot" in refusal(pod)


def test_a_lost_state_folder_is_built_anew_from_claims(rig):
    pod = ClaimedPod(rig, shares={"first": [(0, 900)], "second": [(1, 1700)]})
    pod.run("first", "second")
    first, before = rig.spec(pod.slot("first")), rig.agent.grants.list_grants()
    for grant in before:
        (rig.folder / "state" / "grants" / pod.uid / f"{grant.container}.json").unlink()
    rig.stop()
    rig.start()
    grants = rig.agent.grants.list_grants()
    assert {grant.container: grant.slots for grant in grants} == {grant.container: grant.slots for grant in before}
    assert {grant.claim for grant in grants} == {pod.name.name}
    assert rig.spec(pod.slot("first")) == first


@pytest.mark.parametrize("loss", ["the claim is gone", "the chart has another mode"])
def test_a_lost_state_folder_without_the_claim_still_holds_the_share(rig, loss, monkeypatch):
    pod = ClaimedPod(rig, shares={"main": [(0, P100)]})
    pod.run()
    get = KubeClient.get

    def refuse_claims(client: KubeClient, path: str, *args: object, **options: object) -> dict:
        if path.endswith(pod.name.name):
            raise errors.Forbidden(403, "Forbidden", "cannot get resourceclaims")
        return get(client, path, *args, **options)

    if loss == "the claim is gone":
        pod.delete_claim()
    else:
        monkeypatch.setattr(KubeClient, "get", refuse_claims)
    (rig.folder / "state" / "grants" / pod.uid / "main.json").unlink()
    rig.stop()
    rig.start()
    assert "are still held by default/a" in refusal(ClaimedPod(rig, "late"))


def replace_owner(pod: ClaimedPod) -> None:
    pod.claim["metadata"]["ownerReferences"][0]["uid"] = "another"


def reserve_for_other(pod: ClaimedPod) -> None:
    other = {"resource": "pods", "name": "thief", "uid": "thief"}
    pod.claim["status"]["reservedFor"] = [other]


def reserve_for_two(pod: ClaimedPod) -> None:
    pod.claim["status"]["reservedFor"].append({"resource": "pods", "name": "thief", "uid": "thief"})


def move_to_other_node(pod: ClaimedPod) -> None:
    allocation = pod.claim["status"]["allocation"]
    allocation["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"] = ["n2"]
    for device in allocation["devices"]["results"]:
        device["pool"] = "n2"


def change_class(pod: ClaimedPod) -> None:
    pod.claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.example.com"


def change_driver(pod: ClaimedPod) -> None:
    pod.claim["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.example.com"


def deallocate(pod: ClaimedPod) -> None:
    pod.claim["status"] = {}


def take_more(pod: ClaimedPod) -> None:
    parameters = pod.claim["status"]["allocation"]["devices"]["config"][0]["opaque"]["parameters"]
    parameters["containers"]["0"][0][2] = 12_000


def annotate_more(pod: ClaimedPod) -> None:
    annotations = pod.pod["metadata"]["annotations"]
    annotations[names.ASSIGNMENT] = annotations[names.ASSIGNMENT].replace("8138", "12000")


def name_other_container(pod: ClaimedPod) -> None:
    pod.pod["spec"]["containers"][0]["name"] = "renamed"


def use_other_claim(pod: ClaimedPod) -> None:
    pod.pod["spec"]["resourceClaims"][0]["resourceClaimName"] = "cardwise-0000000000000000"


def bind_elsewhere(pod: ClaimedPod) -> None:
    pod.pod["spec"]["nodeName"] = "n2"


def leave_config_out(pod: ClaimedPod) -> None:
    pod.claim["status"]["allocation"]["devices"]["config"] = []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace_owner, "does not own the claim"),
        (reserve_for_other, "does not own the claim"),
        (reserve_for_two, "does not name exactly one pod"),
        (move_to_other_node, "is allocated on node n2, not on n1"),
        (change_class, "is not of the class cardwise.dev"),
        (change_driver, "is a device of 'gpu.example.com'"),
        (deallocate, "is not allocated any more"),
        (take_more, "name different GPUs"),
        (annotate_more, "name different GPUs"),
        (name_other_container, "does not have; create the pod again"),
        (use_other_claim, "uses claim 'cardwise-0000000000000000'"),
        (bind_elsewhere, "is not bound to node n1"),
        (leave_config_out, "has no entry for 'main'"),
    ],
)
def test_what_does_not_belong_together_is_refused_and_leaves_nothing(rig, change, reason):
    pod = ClaimedPod(rig)
    change(pod)
    pod.write()
    assert reason in refusal(pod)
    assert rig.agent.grants.list_grants() == []
    assert rig.spec(pod.slot()) is None


def test_a_claim_of_the_same_name_is_another_claim(rig):
    pod = ClaimedPod(rig)
    name = pod.name
    pod.claim = copy.deepcopy(pod.claim)
    pod.delete_claim()
    pod.claim["metadata"]["uid"] = "second"
    pod.write()
    with pytest.raises(StartRefused, match="has been replaced by another one"):
        rig.agent._run_timed_prepare(name, lambda: True)
    pod.prepare()


def test_a_claim_that_is_gone_and_a_pod_that_is_gone_are_refused(rig):
    pod, other = ClaimedPod(rig), ClaimedPod(rig, "b")
    pod.delete_claim()
    assert "does not exist any more" in refusal(pod)
    rig.force_delete(other.pod)
    assert "to which claim" in refusal(other)


def test_without_the_api_server_nothing_is_prepared(rig):
    pod = ClaimedPod(rig)
    rig.api.down = True
    assert "cannot be read" in refusal(pod)
    rig.api.down = False
    pod.prepare()


def test_a_pod_by_claim_does_not_hold_up_the_end_of_the_plugin(rig):
    """The kubelet admits it without the plugin, and tries its preparation again."""
    pod, by_slot = ClaimedPod(rig), rig.bind("by-slot", [(1, 900)])
    rig.see()
    unadmitted = shutdown.list_unadmitted_pods(rig.agent.pods.list_pods(), rig.agent._kubelet)
    assert unadmitted == ["default/by-slot"]
    assert pod.pod["status"]["phase"] == by_slot["status"]["phase"] == "Pending"


def test_two_claims_on_one_card_never_exceed_it(rig):
    first, second = ClaimedPod(rig, "a", {"main": [(0, 9000)]}), ClaimedPod(rig, "b", {"main": [(0, 9000)]})
    first.run()
    assert "9000 of 16276 MiB are still held by default/a" in refusal(second)
    assert rig.held_on_disk(0) == 9000


def test_a_call_that_the_kubelet_has_given_up_grants_nothing(rig):
    pod = ClaimedPod(rig)
    with pytest.raises(StartRefused, match="abandoned"):
        rig.agent._run_timed_prepare(pod.name, lambda: False)
    assert rig.agent.grants.list_grants() == []
