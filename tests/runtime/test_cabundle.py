import base64
import copy
import itertools

import jsonpatch
import pytest

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors
from cardwise.runtime.cabundle import CaBundle, bundle_patch
from tests.fakes.clock import FakeClock

PEM = b"-----BEGIN CERTIFICATE-----\n..."
BASE64 = base64.b64encode(PEM).decode()


def configuration(*bundles: str | None) -> dict:
    webhooks = [
        {"name": f"w{n}", "clientConfig": {"service": {}} | ({"caBundle": bundle} if bundle else {})}
        for n, bundle in enumerate(bundles)
    ]
    return {"metadata": {"name": "cardwise", "resourceVersion": "1"}, "webhooks": webhooks}


class FakeConfigurations:
    """get and patch as the API server does them; `meddle` runs between the two."""

    def __init__(self, **objects: dict) -> None:
        self.objects = {
            f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/cardwise": obj
            for kind, obj in objects.items()
        }
        self.meddle: list = []
        self.patches = 0

    def get(self, path, query=None, *, timeout=None):
        if path not in self.objects:
            raise errors.NotFound(404, "NotFound", path)
        found = copy.deepcopy(self.objects[path])
        if self.meddle:
            self.meddle.pop()(self.objects[path])
        return found

    def patch(self, path, obj, kind, field_manager, **_):
        assert kind == "json"
        self.patches += 1
        try:
            changed = jsonpatch.apply_patch(self.objects[path], obj)
        except jsonpatch.JsonPatchTestFailed as error:
            raise errors.Invalid(422, "Invalid", str(error)) from error
        changed["metadata"]["resourceVersion"] = str(int(changed["metadata"]["resourceVersion"]) + 1)
        self.objects[path] = changed
        return changed

    def bundles(self) -> set[str | None]:
        return {hook["clientConfig"].get("caBundle") for obj in self.objects.values() for hook in obj["webhooks"]}

    def watch(self, *_, **__):
        raise errors.Unreachable("no watch in this fake")

    def list_pages(self, *_, **__):
        raise errors.Unreachable("no list in this fake")


def make(fake, clock: Clock = SYSTEM) -> CaBundle:
    bundle = CaBundle(fake, mutating=["cardwise"], validating=["cardwise"], clock=clock)
    bundle.set(PEM)
    return bundle


def test_every_webhook_gets_the_bundle_and_a_second_round_writes_nothing():
    fake = FakeConfigurations(mutating=configuration(None, "b2xk"), validating=configuration(BASE64))
    bundle = make(fake)
    assert bundle.ensure()
    assert fake.bundles() == {BASE64}
    assert fake.patches == 1
    assert bundle.ensure()
    assert fake.patches == 1


def test_change_between_read_and_write_is_not_lost():
    def upgrade(obj: dict) -> None:
        obj["metadata"]["resourceVersion"] = "7"
        obj["webhooks"].insert(0, {"name": "new", "clientConfig": {}})

    fake = FakeConfigurations(mutating=configuration(None), validating=configuration(None))
    fake.meddle = [upgrade]
    assert make(fake).ensure()
    assert fake.bundles() == {BASE64}


def test_missing_configuration_is_not_an_error_and_endless_conflict_is():
    assert not make(FakeConfigurations(mutating=configuration(None))).ensure()
    fake = FakeConfigurations(mutating=configuration(None), validating=configuration(None))
    versions = itertools.count(100)
    fake.meddle = [lambda obj: obj["metadata"].update(resourceVersion=str(next(versions)))] * 50
    with pytest.raises(errors.Invalid):
        make(fake).ensure()


def test_a_bundle_that_may_be_newer_is_overwritten_only_after_a_look_into_the_store():
    fake = FakeConfigurations(mutating=configuration(None), validating=configuration(None))
    bundle, asked = make(fake), []
    bundle.on_other = lambda: asked.append(True)
    assert bundle.ensure()
    # Another replica has renewed the certificates.
    newer = base64.b64encode(b"newer").decode()
    for obj in fake.objects.values():
        obj["webhooks"][0]["clientConfig"]["caBundle"] = newer
    written = fake.patches
    assert not bundle.ensure()
    assert asked
    bundle.set(b"newer")
    assert bundle.ensure()
    assert fake.patches == written
    # Somebody who has no part in it has edited one of them.
    next(iter(fake.objects.values()))["webhooks"][0]["clientConfig"]["caBundle"] = "b2xk"
    assert not bundle.ensure()
    bundle.set(b"newer")
    assert bundle.ensure()
    assert fake.bundles() == {newer}


def test_no_patch_when_nothing_differs():
    assert bundle_patch(configuration(BASE64, BASE64), BASE64) == []
    assert bundle_patch({"metadata": {}}, BASE64) == []


def test_it_is_asserted_again_after_somebody_dropped_it():
    fake = FakeConfigurations(mutating=configuration(None), validating=configuration(None))
    clock = FakeClock()
    bundle = make(fake, clock)
    bundle._reflectors = []  # the interval alone; the reflector is tested with a real API server
    bundle.start()
    clock.until_waiting()
    assert bundle.asserted.is_set()
    for obj in fake.objects.values():
        obj["webhooks"][0]["clientConfig"].pop("caBundle")
    clock.step()
    clock.until_waiting()
    assert fake.bundles() == {BASE64}
    bundle.set(b"another")
    clock.until_waiting()
    assert bundle.asserted.is_set()
    assert fake.bundles() == {base64.b64encode(b"another").decode()}
    bundle.stop()
