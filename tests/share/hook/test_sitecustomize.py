"""The image's own sitecustomize, which ours hides: it runs as if we were not there."""

import pytest

from tests.share import fakes
from tests.share.container import HALF


def test_it_runs_and_programs_find_it_by_name(container):
    container.install({"sitecustomize.py": "import sys; sys.image = __file__; name = __name__"})
    program = "import sys, sitecustomize as s; print(sys.image == s.__file__, s.name, s.__spec__.name)"
    assert container.output_of(program, **HALF) == "True sitecustomize sitecustomize"


@pytest.mark.parametrize("env", [{}, {**HALF, "CARDWISE_FRAMEWORKS": "off"}])
def test_it_runs_where_the_hook_is_idle(container, env):
    container.install({"sitecustomize.py": "import sys; sys.image = True"})
    assert container.output_of("import sys; print(sys.image)", **env) == "True"


def test_a_package_of_that_name(container):
    container.install({"sitecustomize/__init__.py": "from .more import *", "sitecustomize/more.py": "given = 1"})
    assert container.output_of("import sitecustomize; print(sitecustomize.given)", **HALF) == "1"


def test_a_folder_of_that_name_is_none(container):
    (container.site / "sitecustomize").mkdir()
    assert container.output_of("import sitecustomize as s; print(s.__file__)", **HALF).startswith(str(container.mount))


def test_the_frameworks_that_it_imports_are_handled(container):
    container.install({**fakes.CUPY, "sitecustomize.py": "import cupy"})
    assert container.output_of("import cupy; print(cupy.limit)", **HALF) != "None"


@pytest.mark.parametrize("raised", ["ValueError('image')", "ImportError('image')", "SystemExit(7)"])
def test_what_it_raises_does_what_it_does_without_us(container, raised):
    container.install({**fakes.CUPY, "sitecustomize.py": f"raise {raised}"})
    program = "import sys; print('sitecustomize' in sys.modules)"
    hooked = container.run(program, **HALF)
    container.path = [container.site]
    plain = container.run(program, **HALF)
    assert (hooked.returncode, hooked.stdout) == (plain.returncode, plain.stdout)
    assert hooked.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_the_hook_is_on_watch_even_if_it_raises(container):
    container.install({**fakes.CUPY, "sitecustomize.py": "raise ValueError('image')"})
    assert container.run("import cupy; print(cupy.limit)", **HALF).stdout.strip() != "None"


TRACER = """
    import os, sys
    sys.tracer = getattr(sys, "tracer", 0) + 1
    # As tracers do: out of the way, and what comes next under the same name.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
    sys.modules.pop("sitecustomize", None)
    import sitecustomize
"""


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_tool_that_hands_on_too(container, tmp_path, ours_first):
    """Each of the three runs: the tool's and the image's once, and one finder watches."""
    container.install({"sitecustomize.py": TRACER}, below=tmp_path / "tracer")
    container.install({"sitecustomize.py": "import sys; sys.image = getattr(sys, 'image', 0) + 1"})
    tool = [tmp_path / "tracer"]
    container.path = (
        [container.mount, *tool, container.site] if ours_first else [*tool, container.mount, container.site]
    )
    program = """
        import sys
        print(sys.tracer, sys.image, sum(type(f).__module__ == "_cardwise_finder" for f in sys.meta_path))
    """
    assert container.output_of(program, **HALF) == "1 1 1"
