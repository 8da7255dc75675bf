"""The share agent's volume: its mounts, and refused mounts of users at its paths."""

import pytest

from tests import build
from tests.webhook.sharing import (
    FOLDER,
    VOLUME,
    Json,
    admitted,
    judged,
    own,
    refused,
)


def with_volume(pod: Json, volume: Json, *mounted: Json) -> Json:
    pod["spec"]["volumes"] = [volume]
    pod["spec"]["containers"][0]["volumeMounts"] = list(mounted)
    return pod


@pytest.mark.parametrize(
    ("volume", "mounted", "says"),
    [
        (
            {"name": "cardwise-share", "hostPath": {"path": "/x"}},
            [],
            "spec.volumes[0].name: cardwise-share is reserved for the volume",
        ),
        (
            {"name": "cardwise-share", "emptyDir": {}},
            [{"name": "cardwise-share", "mountPath": "/mine"}],
            "spec.containers[0].volumeMounts[0].name: cardwise-share is reserved for the volume",
        ),
        *(
            (
                {"name": "mine", "emptyDir": {}},
                [{"name": "mine", "mountPath": path}],
                "spec.containers[0].volumeMounts[0].mountPath: /",
            )
            for path in (FOLDER, f"{FOLDER}/", "/run/cardwise", "/var/run/cardwise/mps/pipe", "//run/./cardwise/python")
        ),
    ],
)
def test_user_mounts_at_reserved_paths_are_refused(volume: Json, mounted: list[Json], says: str) -> None:
    assert says in refused(with_volume(build.pod(gpu_mem=1), volume, *mounted))


def test_other_mounts_stay() -> None:
    mine = {"name": "mine", "mountPath": "/run/cardwiser"}
    after, warnings = admitted(with_volume(build.pod(gpu_mem=1000), {"name": "mine", "emptyDir": {}}, mine))
    assert warnings == ()
    assert after["spec"]["volumes"] == [{"name": "mine", "emptyDir": {}}, VOLUME]
    assert after["spec"]["containers"][0]["volumeMounts"] == [mine, own("0")]


@pytest.mark.parametrize("change", ["volume", "mount", "writable", "another's", "agent's"])
def test_later_changes_by_another_webhook_are_refused(change: str) -> None:
    stored, _ = admitted(build.pod(containers=[build.container("a", gpu_mem=1), build.container("b")]))
    spec = stored["spec"]
    first, second = spec["containers"]
    match change:
        case "volume":
            spec["volumes"] = [{"name": "cardwise-share", "hostPath": {"path": "/x"}}]
        case "mount":
            first["volumeMounts"] = []
        case "writable":
            del first["volumeMounts"][0]["readOnly"]
        case "another's":
            second["volumeMounts"] = [{"name": "cardwise-share", "mountPath": "/x"}]
        case "agent's":
            spec["initContainers"][0]["volumeMounts"] = []
    decision = judged(stored)
    assert not decision.allowed
    assert "cardwise-share" in decision.message
    assert "keep that webhook from changing it" in decision.message
