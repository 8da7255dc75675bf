"""The extender stanzas of kube-scheduler's configuration."""

import pytest

from cardwise.core.api import names, schedulerconfig

FILES = {"ca_file": "ca", "cert_file": "cert", "key_file": "key"}


def stanzas(**files: str) -> list[dict]:
    return schedulerconfig.extender_stanzas(filter_url="https://a:1", bind_url="https://b:2", **files)


def managed(stanza: dict) -> dict[str, bool]:
    """Whether the scheduler ignores each resource, by name."""
    return {resource["name"]: resource["ignoredByScheduler"] for resource in stanza["managedResources"]}


def test_each_verb_is_in_exactly_one_stanza():
    fast, slow = stanzas()
    verbs = {key: path for stanza in (fast, slow) for key, path in stanza.items() if key.endswith("Verb")}
    assert verbs == {f"{verb}Verb": verb for verb in ("filter", "prioritize", "preempt", "bind")}
    assert (fast["urlPrefix"], slow["urlPrefix"]) == (
        "https://a:1" + names.EXTENDER_PREFIX,
        "https://b:2" + names.EXTENDER_PREFIX,
    )
    assert "bindVerb" in slow


def test_each_resource_is_in_one_stanza_and_only_markers_are_ignored_by_the_scheduler():
    fast, slow = map(managed, stanzas())
    assert not fast.keys() & slow.keys(), "kube-scheduler refuses its configuration otherwise"
    assert fast == {names.GPU_MEM: False, names.WHOLE_GPU: False, names.FILTER_CALL_RESOURCE: True}
    assert slow == {names.SHARE: False, names.BIND_CALL_RESOURCE: True}


def test_fast_verbs_time_out_soon_and_bind_may_take_long():
    fast, slow = stanzas()
    assert (fast["httpTimeout"], slow["httpTimeout"]) == ("1s", "300s")


def test_gpu_pods_wait_if_the_extender_does_not_answer():
    assert [stanza["ignorable"] for stanza in stanzas()] == [False, False]
    assert all(stanza["nodeCacheCapable"] for stanza in stanzas())


def test_both_stanzas_use_tls_if_the_files_are_given():
    tls_config = {"insecure": False, "caFile": "ca", "certFile": "cert", "keyFile": "key"}
    assert [(stanza["enableHTTPS"], stanza["tlsConfig"]) for stanza in stanzas(**FILES)] == [(True, tls_config)] * 2
    assert not any("enableHTTPS" in stanza or "tlsConfig" in stanza for stanza in stanzas())


@pytest.mark.parametrize("index", [0, 1])
def test_stanzas_share_no_mutable_objects(index):
    first = stanzas(**FILES)
    first[index]["tlsConfig"]["caFile"] = "other"
    assert first[1 - index]["tlsConfig"]["caFile"] == "ca"
