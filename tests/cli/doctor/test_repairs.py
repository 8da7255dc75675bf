"""What findings tell people to do can be done: the commands, values and pages that a remedy names are there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from cardwise.cli import main
from cardwise.cli.doctor import repairs
from cardwise.cli.doctor.finding import Severity
from tests.cli.doctor import planted, test_doctor, test_startup
from tests.cli.doctor.planted import part, troubles

ROOT = Path(__file__).parents[3]
VALUES = yaml.safe_load((ROOT / "helm" / "cardwise" / "values.yaml").read_text())
PLANTS = [
    function
    for module in (test_doctor, test_startup)
    for name, function in sorted(vars(module).items())
    if name.startswith("plant_")
]
CRASHES = [test_startup.NO_DRIVER, "no runtime for", "x"]


def remedies() -> Iterator[str]:
    for plant in PLANTS:
        seen = planted.installation()
        plant(seen)
        for finding in troubles(seen):
            assert finding.level is Severity.OK or finding.remedy, finding
            yield finding.remedy
    for component in ("webhook", "extender", "deviceplugin", "mps", "scheduler"):
        for message, reason in ((CRASHES[0], "Error"), ("x", "Error"), ("", "OOMKilled")):
            seen = planted.installation()
            seen.own_pods = [test_startup.crashing(component, message, reason=reason)]
            yield from (finding.remedy for finding in troubles(seen))
        seen.own_pods = [test_startup.waiting(component, "ErrImagePull", "")]
        refused = test_startup.event("Job", f"cardwise-{component}", "FailedCreate", test_startup.NO_CLASS)
        seen.own_events = test_startup.read(refused)
        yield from (finding.remedy for finding in troubles(seen))
    for deployments in ([part("scheduler")], [part("extender")], [part("extender", release="")]):
        seen = planted.installation()
        seen.unread_kinds["networkpolicies"] = "not of this test"
        seen.pod_events, seen.deployments = [test_startup.deletion("a", 1)], deployments
        yield from (finding.remedy for finding in troubles(seen))


REMEDIES = sorted(set(remedies()))


@pytest.mark.parametrize("remedy", REMEDIES)
def test_values_pages_and_our_commands_of_a_remedy_are_there(remedy: str) -> None:
    for setting in re.findall(rf"(?<![\w./-])(?:{'|'.join(VALUES)})(?:\.[a-zA-Z]+)+", remedy):
        at = VALUES
        for key in setting.split("."):
            assert key in at, setting
            at = at[key] or {}
    for page, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", remedy):
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, f"{page}#{anchor}"
    for command in re.findall(r"(?:^|[:`(] ?)cardwise ([a-z-]+)", remedy):
        assert main.cli.get_command(click.Context(main.cli), command), command


def test_a_helm_command_of_a_remedy_names_the_chart_that_is_there() -> None:
    commands = [
        re.split(r" \(| && |; ", remedy[remedy.index("helm upgrade") :])[0]
        for remedy in REMEDIES
        if "helm upgrade" in remedy
    ]
    assert commands
    for command in commands:
        helm, upgrade, release, chart, *flags = shlex.split(command)
        assert (helm, upgrade, release) == ("helm", "upgrade", "cardwise")
        assert (ROOT / chart / "Chart.yaml").exists()
        assert flags[:3] == ["-n", "cardwise-system", "--reset-then-reuse-values"]
        assert flags[3:4] in ([], ["--set"]), command


@pytest.mark.parametrize(
    ("mode", "command"),
    [
        (
            "manual",
            "steps 1 and 3 of: helm get notes cardwise -n cardwise-system), or let the chart do it: helm",
        ),
        ("kubeadm", "let the chart do it: helm upgrade cardwise helm/cardwise -n cardwise-system --reset-then-reuse-"),
        ("own", "kubectl rollout restart deployment/cardwise-scheduler -n cardwise-system"),
    ],
)
def test_stale_certificates_are_renewed_in_the_way_of_the_mode(mode: str, command: str) -> None:
    seen = planted.installation()
    seen.schedulers = [test_doctor.kube_scheduler("cp1", wired=mode == "kubeadm")]
    seen.deployments = [part("extender"), *([part("scheduler")] if mode == "own" else [])]
    remedy = repairs.suggest_certificate_renewal(seen)
    assert command in remedy
    assert ("scheduler.mode=" in remedy) == (mode == "manual")
