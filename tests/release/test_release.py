"""The files of `make release`: they agree with each other and with the sources, and are reproducible."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from release import artifacts, readiness
from tests.helm.conftest import helm  # noqa: F401 - a fixture
from tests.helm.test_images import stages

ROOT = Path(__file__).parents[2]
HATCHLING = ROOT / ".release" / "bin" / "hatchling"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
CHART = ROOT / "helm" / "cardwise"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A repository with the files that a release checks, ready to be released."""
    (tmp_path / "helm" / "cardwise").mkdir(parents=True)
    write(tmp_path, "pyproject.toml", '[project]\nname = "cardwise"\nversion = "1.2.3"\n')
    write(tmp_path, "helm/cardwise/Chart.yaml", "version: 1.2.3\nappVersion: 1.2.3\n")
    write(tmp_path, "CHANGELOG.md", "# Changelog\n\n## 1.2.3, 2026-12-01\n\n- New.\n\n## 1.2.2, 2026-11-01\n\n- Old.\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "one")


def test_what_is_ready_has_the_notes_of_its_section_alone(sources: Path) -> None:
    assert readiness.find_problems(sources, readiness.version(sources)) == []
    assert readiness.release_notes(sources, "1.2.3") == "- New.\n"
    git(sources, "tag", "v1.2.3")
    assert readiness.find_problems(sources, "1.2.3") == [], "the tag of this very commit"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("helm/cardwise/Chart.yaml", "version: 1.2.3\nappVersion: 1.2.2\n", "appVersion is 1.2.2"),
        ("CHANGELOG.md", "# Changelog\n\n## 1.2.2, 2026-11-01\n\n- Old.\n", "CHANGELOG.md has no section 1.2.3"),
        ("CHANGELOG.md", "## 1.2.3, not released yet\n\n- New.\n", "1.2.3 has no day"),
    ],
)
def test_what_is_unfinished_is_said(sources: Path, file: str, text: str, problem: str) -> None:
    write(sources, file, text)
    problems = readiness.find_problems(sources, "1.2.3")
    assert len(problems) == 2
    assert problem in problems[0]
    assert "not committed" in problems[1]
    commit(sources)
    assert [problem in line for line in readiness.find_problems(sources, "1.2.3")] == [True]


def test_a_version_is_released_once(sources: Path) -> None:
    git(sources, "tag", "v1.2.3")
    write(sources, "more", "")
    commit(sources)
    assert readiness.find_problems(sources, "1.2.3") == ["the tag v1.2.3 is of another commit"]


def test_our_own_files_agree() -> None:
    problems = readiness.find_problems(ROOT, readiness.version(ROOT))
    assert [line for line in problems if "Chart.yaml" in line or "no section" in line] == []
    assert readiness.release_notes(ROOT, VERSION)


def test_checksums_are_as_sha256sum_reads_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path, name, name)
    lines = artifacts.write_checksums(tmp_path)
    assert [line.rpartition(" ")[2] for line in lines] == ["a", "b"]
    assert artifacts.write_checksums(tmp_path) == lines
    subprocess.run(["sha256sum", "--check", "--strict", artifacts.CHECKSUMS_FILE], cwd=tmp_path, check=True)


def test_the_chart_is_packed(helm: str, tmp_path: Path) -> None:  # noqa: F811
    artifacts.package_chart(ROOT, tmp_path, helm)
    packed = tmp_path / f"cardwise-chart-{VERSION}.tgz"
    shown = subprocess.run([helm, "show", "chart", packed], capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(shown)["version"] == VERSION


@pytest.mark.skipif(not HATCHLING.exists(), reason="make release installs hatchling")
def test_wheel_and_sources_are_the_same_again_and_have_nothing_of_the_tests(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        artifacts.build_python(ROOT, folder, str(HATCHLING), 1_700_000_000)
    assert len({tuple(artifacts.write_checksums(folder)) for folder in folders}) == 1
    (wheel,) = folders[0].glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"cardwise", "webhook", "extender", "deviceplugin", "mps", f"cardwise-{VERSION}.dist-info"}


def test_artifact_hub_knows_all_our_kinds() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    listed = {(crd["kind"], crd["version"], crd["name"]) for crd in yaml.safe_load(annotations["artifacthub.io/crds"])}
    crds = [yaml.safe_load(path.read_text()) for path in (CHART / "files" / "crds").glob("*.yaml")]
    there = {
        (crd["spec"]["names"]["kind"], crd["spec"]["versions"][0]["name"], crd["metadata"]["name"]) for crd in crds
    }
    assert listed == there


def test_the_workflow_makes_the_release_of_the_makefile_and_both_images() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yaml").read_text()
    steps = yaml.safe_load(text)["jobs"]["release"]["steps"]
    assert "make release ARGS=--final" in [step.get("run") for step in steps]
    built = [step["with"] for step in steps if str(step.get("uses", "")).startswith("docker/build-push-action@")]
    assert {image["target"] for image in built} == {"cardwise", "agent"} <= stages().keys()
    assert {image["platforms"] for image in built} == {"linux/amd64,linux/arm64"}
    assert [(image["sbom"], image["provenance"]) for image in built] == [(True, "mode=max")] * 2
    number = next(step["run"] for step in steps if step.get("id") == "version")
    assert "number=${GITHUB_REF_NAME#v}" in number, "the tag v0.1.0; the chart asks for the image 0.1.0"
    assert {image["tags"].partition(":")[2] for image in built} == {"${{ steps.version.outputs.number }}"}


def imports(start: str) -> Iterator[tuple[str, str]]:
    """The third-party modules that the package may import, each with a module of ours that imports it."""
    todo = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / start.replace(".", "/")).rglob("*.py")]
    seen: set[str] = set()
    while todo:
        name = todo.pop().removesuffix(".__init__")
        base = ROOT / name.replace(".", "/")
        path = next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.exists()), None)
        if name in seen or path is None:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                top = module.partition(".")[0]
                parents = module.split(".")
                if (ROOT / top / "__init__.py").exists():
                    todo += [".".join(parents[:i]) for i in range(1, len(parents) + 1)]
                elif top not in sys.stdlib_module_names:
                    yield top, name


def test_the_command_needs_no_package_of_the_parts() -> None:
    """`pipx install cardwise` is the command line."""

    def names(wanted: list[str]) -> set[str]:
        return {Requirement(requirement).name.lower() for requirement in wanted}

    belongs = metadata.packages_distributions()
    extras = PROJECT["optional-dependencies"]
    for module, ours in imports("cardwise.cli"):
        if module == "urllib3":  # of `kubernetes`
            continue
        packages = {distribution.lower().replace("_", "-") for distribution in belongs[module]}
        assert packages & (names(PROJECT["dependencies"]) | names(extras["simulate"])), f"{ours} imports {module}"
    assert names(PROJECT["dependencies"]) & names(extras["server"]) == set()
