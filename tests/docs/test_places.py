"""What the documents point at is there; tests lie in the rooms of the product."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.scenes import SCENES
from docs.pictures import cast, draw

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("examples/README.md", "tests/README.md", "tests/cluster/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "generated"),
]
# Records of decisions name files as they were called then.
TODAY = [page for page in PAGES if page.parent.name != "design"]
# The files of `commands` are named as the commands, those of `hook` as what they are for.
SIGNS = [
    path
    for part in ("cardwise", "extender", "deviceplugin", "mps", "webhook")
    for path in sorted((ROOT / part).rglob("__init__.py"))
    if path.parent.name not in ("commands", "hook")
]
PARTS = "cardwise|core|extender|deviceplugin|mps|webhook|bench|demo|docs|examples|helm|requirements|tests"


def package(part: str) -> Path | None:
    """The product's folder that tests/<part> is for."""
    return next((path for path in (ROOT / "cardwise" / part, ROOT / part) if (path / "__init__.py").exists()), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_repository(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    targets = {link: (page.parent / link).resolve() for link in links if "://" not in link}
    assert [link for link, target in targets.items() if not target.exists() or is_generated(target)] == []


def is_generated(page: Path) -> bool:
    """Whether `make docs` writes the page: GitHub does not have it, so pages link to the source of its facts."""
    return page.parent == ROOT / "docs" / "reference" / "generated"


def anchors(page: Path) -> set[str]:
    """Of the headings of the page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_finds_it(page):
    links = re.findall(r"\]\(((?:[\w/.-]+\.md)?)#([^)\s]+)\)", page.read_text())
    lost = [(path, anchor) for path, anchor in links if anchor not in anchors(page.parent / path if path else page)]
    assert lost == []


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_in_backquotes_is_there(page):
    paths = re.findall(rf"`((?:{PARTS})/[\w/.-]+\.(?:py|md|yaml|proto|tpl|json))`", page.read_text())
    files = [re.sub("^core/", "cardwise/core/", path) for path in paths]
    assert [path for path in files if not any((base / path).exists() for base in (ROOT, ROOT / "tests"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    lost = [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()]
    assert lost == []


def test_every_name_behind_a_file_is_in_it():
    table = (ROOT / "docs" / "code-map.md").read_text()
    rows = re.findall(r"\]\(\.\./([\w/.]+)\)((?:,? ?`[\w.]+`)*)", table)
    assert len(rows) > 30
    for path, names in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"[\w]+", names):
            assert re.search(rf"^(?:    )?(?:(?:class|def) )?{name}\b", text, re.MULTILINE), f"{path} has no {name}"


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: str(sign.parent.relative_to(ROOT)))
def test_the_sign_of_a_room_names_its_modules(sign):
    docstring = ast.get_docstring(ast.parse(sign.read_text()))
    inside = [path.stem for path in sign.parent.glob("[a-z]*.py") if not path.stem.endswith("_pb2")]
    inside += [path.parent.name for path in sign.parent.glob("*/__init__.py")]
    assert [name for name in inside if not re.search(rf"`{name}`|^ *{name}  ", docstring, re.MULTILINE)] == []


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: str(sign.parent.relative_to(ROOT)))
def test_the_sign_of_a_room_says_what_comes_in_and_what_goes_out(sign):
    docstring = ast.get_docstring(ast.parse(sign.read_text()))
    text = re.sub(r"\s+", " ", docstring)
    assert re.search(r"Input(, [^:]*)?: ", text)
    assert re.search(r"Output(, [^:]*)?: ", text)


@pytest.mark.parametrize("folder", ["examples", "docs/howto"])
def test_the_index_of_a_folder_names_each_file(folder):
    base = ROOT / folder
    files = {
        str(path.relative_to(base)) for path in base.rglob("*") if path.suffix in (".yaml", ".md") and path.is_file()
    }
    named = set(re.findall(r"\]\(([\w/.-]+)\)", (base / "README.md").read_text()))
    assert files - named == {"README.md"}


def test_workflows_call_targets_that_there_are():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yaml")]
    called = [name for text in workflows for line in re.findall(r"\bmake ([a-z -]+)", text) for name in line.split()]
    assert "integration" in called
    assert set(called) <= targets


def test_actions_of_others_are_pinned_by_their_commits():
    """Whoever takes over an action's repository can move its tags, and `release` signs what the actions have made."""
    workflows = [path.read_text() for path in (ROOT / ".github").rglob("*.yaml")]
    used = [line for text in workflows for line in re.findall(r"\buses: (?!\./)(.+)", text)]
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []


@pytest.mark.parametrize("name", draw.PICTURES)
def test_every_picture_is_what_its_text_or_recording_says(name):
    assert (draw.FOLDER / f"{name}.svg").read_text() == draw.PICTURES[name](), "make pictures"


def test_pictures_load_nothing_and_run_no_script_and_have_an_alternative_text():
    for path in draw.FOLDER.glob("*.svg"):
        picture = path.read_text()
        assert path.stem in draw.PICTURES
        assert set(re.findall(r"\w+://[^\s\"<]+", picture)) == {"http://www.w3.org/2000/svg"}
        assert re.findall(r"<script|<image|\bhref|@import", picture) == []
        assert re.search(r"<title>(?:\S+ ){4,}", picture)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_every_picture_is_on_a_page_with_an_alternative_text(name):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = [text for page in pages for text in re.findall(rf"!\[(.*)\]\(\S*pictures/{name}\.svg\)", page.read_text())]
    assert words
    assert "" not in words


def test_the_recording_of_the_demo_shows_the_scenes_of_today():
    """Else `make recordings`."""
    recorded = [line.strip() for _, line in cast.read_lines()]
    for number, scene in enumerate(SCENES, 1):
        title = recorded.index(f"{number}/{len(SCENES)} {scene.title}")
        assert recorded[title + 1] == scene.purpose
        assert recorded[title + 2].startswith("✓")


def test_the_decision_tree_names_each_mode_of_the_chart():
    schema = json.loads((ROOT / "helm" / "cardwise" / "values.schema.json").read_text())
    modes = schema["properties"]["scheduler"]["properties"]["mode"]["enum"]
    answers = [line.partition(" | ")[2] for line in (draw.FOLDER / "choose-values.txt").read_text().splitlines()]
    assert set(filter(None, modes)) <= {answer.partition(":")[0] for answer in answers}


@pytest.mark.parametrize("part", [path.name for path in (ROOT / "tests").iterdir() if package(path.name)])
def test_tests_lie_in_the_rooms_of_what_they_test(part):
    tests, product = ROOT / "tests" / part, package(part)
    readme = (ROOT / "tests" / "README.md").read_text()
    rooms: dict[str, set[Path]] = {}
    for path in product.rglob("*.py"):
        room = path.parent.relative_to(product)
        rooms.setdefault(path.parent.name if path.stem == "__init__" else path.stem, set()).add(room)
    wrong = []
    for path in tests.rglob("test_*.py"):
        room, name = path.parent.relative_to(tests), path.stem.removeprefix("test_")
        named = name if name in rooms else name.replace("_", "")
        if not (product / room).is_dir():  # about one thing in all rooms
            wrong += [] if f"`{part}/{room}`" in readme else [f"tests/{part}/{room} is no room, nor in tests/README.md"]
        elif named in rooms and (named != name or room not in rooms[named]):
            wrong += [f"{path.relative_to(ROOT)}: {named} is in {sorted(map(str, rooms[named]))}"]
    assert wrong == []


def test_other_folders_of_tests_are_in_their_table():
    readme = (ROOT / "tests" / "README.md").read_text()
    rows = {
        name for row in re.findall(r"^\| (`[^|]+`) \|", readme, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {name for name in folders if not package(name) and not (ROOT / name).is_dir()} <= rows


def test_each_test_that_holds_a_rule_is_there():
    table = (ROOT / "tests" / "README.md").read_text().partition("## Rules and the tests that hold them")[2]
    rules = re.findall(r"^\| \d\. [^|]+\|(.*)\|(.*)\|(.*)\|$", table, re.MULTILINE)
    assert len(rules) == 7
    there = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    by_folder = {(path.parts[0], path.stem.removeprefix("test_")) for path in there}
    for row in rules:
        for folder, cell in zip(("property", "unit", "integration"), row, strict=True):
            for name in re.findall(r"`([\w/]+)`", cell):
                assert Path(f"{name}.py") in there or (folder, name) in by_folder, f"{folder}: {name}"


def test_the_first_test_of_the_howto_is_green():
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "your-first-test.md").read_text(), re.DOTALL
    )
    names: dict[str, Callable[[], None]] = {}
    exec(code, names)
    names["test_a_share_goes_to_the_gpu_that_it_fills_best"]()


def test_each_room_of_tests_on_the_cluster_has_a_row():
    section = (ROOT / "tests" / "README.md").read_text().partition("## What only the real cluster can show")[2]
    rows = set(re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE))
    assert rows == {path.parent.name for path in (ROOT / "tests" / "integration").glob("*/test_*.py")}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "integration").rglob("test_*.py")), ids=lambda path: path.stem
)
def test_each_test_on_the_cluster_says_what_only_the_cluster_can_show(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
