import base64
import math
from datetime import timedelta

import pytest

from cardwise.kube import errors, paths
from cardwise.runtime.tls import certs
from cardwise.runtime.tls.cabundle import CaBundle, bundle_patch
from tests.fakes.apiobjects import merged
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

PEM = b"-----BEGIN CERTIFICATE-----\n..."
BASE64 = base64.b64encode(PEM).decode()
PATHS = {
    "mutating": paths.mutatingwebhookconfigurations,
    "validating": paths.validatingwebhookconfigurations,
}


def configuration(*bundles: str | None) -> dict:
    webhooks = [
        {"name": f"w{n}", "clientConfig": {"service": {}} | ({"caBundle": bundle} if bundle else {})}
        for n, bundle in enumerate(bundles)
    ]
    return {"metadata": {"name": "cardwise", "resourceVersion": "1"}, "webhooks": webhooks}


class World:
    """An API server with webhook configurations, and the `CaBundle` under test."""

    def __init__(self, **configurations: dict) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        for kind, manifest in configurations.items():
            self.api.write_object(PATHS[kind](), manifest)
        client = self.api.client(clock=self.clock)
        self.bundle = CaBundle(client, [path("cardwise") for path in PATHS.values()], clock=self.clock)
        self.bundle.set_bundle(PEM)

    @property
    def objects(self) -> list[dict]:
        return [manifest for path in PATHS.values() for manifest in self.api.all(path())]

    def bundles(self) -> set[str | None]:
        return {hook["clientConfig"].get("caBundle") for manifest in self.objects for hook in manifest["webhooks"]}

    def patches(self) -> int:
        """The number of patches that were sent. Checks that each patch is conditional and has our field manager."""
        sent = self.api.sent("patch")
        assert {call.headers["Content-Type"] for call in sent} <= {"application/json-patch+json"}
        assert {call.query["fieldManager"] for call in sent} <= {"cardwise-ca"}
        return len(sent)

    def edit(self, kind: str, **client_config: str | None) -> None:
        """Change the first webhook as another client would."""
        path = PATHS[kind]("cardwise")
        first, *others = self.api.get(path)["webhooks"]
        self.api.edit(path, webhooks=[merged(first, {"clientConfig": client_config}), *others])


def both() -> World:
    return World(mutating=configuration(None), validating=configuration(None))


def test_every_webhook_gets_the_bundle_and_a_second_round_writes_nothing():
    world = World(mutating=configuration(None, "b2xk"), validating=configuration(BASE64))
    assert world.bundle.ensure_bundle()
    assert world.bundles() == {BASE64}
    assert world.patches() == 1
    assert world.bundle.ensure_bundle()
    assert world.patches() == 1


def test_change_between_read_and_write_is_not_lost():
    world = both()
    new = {"name": "new", "clientConfig": {}}
    world.api.after_request(
        lambda get: world.api.edit(get.path, webhooks=[new, *world.api.get(get.path)["webhooks"]]), "get"
    )
    assert world.bundle.ensure_bundle()
    assert len(world.objects[0]["webhooks"]) == 2
    assert world.bundles() == {BASE64}


def test_missing_configuration_is_not_an_error_and_endless_conflict_is():
    assert not World(mutating=configuration(None)).bundle.ensure_bundle()
    world = both()
    world.api.after_request(
        lambda get: world.api.write_object(PATHS["mutating"](), world.api.get(get.path)), "get", times=math.inf
    )
    with pytest.raises(errors.Invalid):
        world.bundle.ensure_bundle()


def test_newer_bundle_is_overwritten_only_after_a_store_check():
    world = both()
    bundle, reports = world.bundle, []
    bundle.on_other = lambda: reports.append(True)
    assert bundle.ensure_bundle()
    # Another replica has renewed the certificates.
    newer = base64.b64encode(b"newer").decode()
    for kind in PATHS:
        world.edit(kind, caBundle=newer)
    written = world.patches()
    assert not bundle.ensure_bundle()
    assert reports
    bundle.set_bundle(b"newer")
    assert bundle.ensure_bundle()
    assert world.patches() == written
    # A user edited one of the configurations.
    world.edit("mutating", caBundle="b2xk")
    assert not bundle.ensure_bundle()
    bundle.set_bundle(b"newer")
    assert bundle.ensure_bundle()
    assert world.bundles() == {newer}


def test_bundle_keeps_both_cas_while_replicas_switch():
    """Otherwise each replica overwrites the other's bundle repeatedly, and half of the calls fail."""
    world = both()
    old, new, expired = (
        certs.new_authority(name, world.clock.wall() - timedelta(days=9), timedelta(days=days)).cert
        for name, days in (("old", 99), ("new", 99), ("expired", 1))
    )
    late = world.bundle
    early = CaBundle(world.api.client(clock=world.clock), late._paths, keep_others=True, clock=world.clock)
    late.keep_others = True
    late.set_bundle(old + expired)
    assert late.ensure_bundle()
    early.set_bundle(new)
    assert early.ensure_bundle()
    for _ in range(3):
        assert late.ensure_bundle()
        assert early.ensure_bundle()
    assert world.bundles() == {base64.b64encode(new + old).decode()}
    assert world.patches() == 4
    late.set_bundle(new)
    assert late.ensure_bundle()
    assert world.patches() == 4
    world.edit("mutating", caBundle=None)
    assert late.ensure_bundle()
    assert base64.b64encode(new).decode() in world.bundles(), "who takes it out gets the present one alone"


def test_no_patch_when_nothing_differs():
    assert bundle_patch(configuration(BASE64, BASE64), BASE64) == []
    assert bundle_patch({"metadata": {}}, BASE64) == []


def test_bundle_is_restored_after_its_removal():
    world = both()
    bundle = world.bundle
    bundle._reflectors = []  # the interval alone
    bundle.start()
    world.clock.until_waiting()
    assert bundle.asserted.is_set()
    for kind in PATHS:
        world.edit(kind, caBundle=None)
    world.clock.step()
    world.clock.until_waiting()
    assert world.bundles() == {BASE64}
    bundle.set_bundle(b"another")
    world.clock.until_waiting()
    assert bundle.asserted.is_set()
    assert world.bundles() == {base64.b64encode(b"another").decode()}
    bundle.stop()


def test_bundle_is_written_at_once_to_new_or_changed_configurations():
    world = World(mutating=configuration(None))
    world.bundle.start()
    world.clock.until_waiting(3)  # a watch of each, and the interval
    assert not world.bundle.asserted.is_set()
    world.api.write_object(PATHS["validating"](), configuration(None))
    world.clock.until_waiting(3)
    assert world.bundle.asserted.is_set()
    assert world.bundles() == {BASE64}
    world.edit("mutating", caBundle=None)
    world.clock.until_waiting(3)
    assert world.bundles() == {BASE64}
    world.bundle.stop()
