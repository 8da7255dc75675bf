"""The hook in a Python of its own: on watch where there is a share, in silence, and gone when its work is done."""

import json
import sys
import textwrap
import zipfile

import pytest

from cardwise.share import FRAMEWORKS
from cardwise.share.hook import _cardwise_finder
from tests.share import fakes
from tests.share.container import HALF, LIMIT_BYTES

LIMIT = str(LIMIT_BYTES)


def test_it_knows_the_frameworks_that_the_package_names():
    assert set(_cardwise_finder.HOOK_FILE_BY_MODULE.values()) == set(FRAMEWORKS)


def test_a_framework_is_told_before_it_runs(container):
    container.install(fakes.CUPY)
    assert container.output_of("import cupy; print(cupy.limit)", **HALF) == LIMIT


def test_the_agents_file_does_where_the_environment_is_lost(container):
    container.install(fakes.CUPY)
    container.share_file.write_text(json.dumps({"limitMiB": 8138, "fraction": 0.5, "enforced": "mps"}))
    assert container.output_of("import cupy; print(cupy.limit)") == LIMIT


@pytest.mark.parametrize(
    "file",
    [
        {"limitMiB": 8138, "fraction": 0.5, "enforced": "kernel"},  # the card that it sees is the share
        {"limitMiB": 16276, "fraction": 1.0, "enforced": "mps"},  # a whole card
    ],
)
def test_nothing_to_do_and_the_finder_leaves(container, file):
    container.install(fakes.CUPY)
    container.share_file.write_text(json.dumps(file))
    assert container.output_of(f"import sys, cupy; print(cupy.limit, {fakes.WATCHING})") == "None False"


def test_without_a_share_nobody_watches(container):
    assert (
        container.output_of(f"import sys; print({fakes.WATCHING}, '_cardwise_finder' in sys.modules)") == "False False"
    )


@pytest.mark.parametrize("switch", ["off", "OFF", " off "])
def test_off_switch(container, switch):
    container.install(fakes.CUPY)
    program = f"import sys, cupy; print(cupy.limit, {fakes.WATCHING})"
    assert container.output_of(program, **HALF, CARDWISE_FRAMEWORKS=switch) == "None False"


def test_a_list_of_frameworks(container):
    container.install({**fakes.CUPY, **fakes.JAXLIB})
    program = "import cupy; from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as o; print(cupy.limit, o())"
    assert container.output_of(program, **HALF, CARDWISE_FRAMEWORKS="torch, JAX") == "None {'memory_fraction': 0.5}"


def test_a_start_loads_two_files_and_nothing_else(container):
    program = "import sys; print(*sorted(sys.modules))"
    plain = set(container.output_of(program, "-I", **HALF).split())
    hooked = set(container.output_of(program, **HALF).split())
    assert hooked - plain == {"_cardwise_finder", "sitecustomize"}


def test_the_finder_leaves_when_all_it_watches_has_run(container):
    container.install({**fakes.CUPY, **fakes.TORCH})
    program = f"""
        import sys
        print({fakes.WATCHING})
        import cupy
        print({fakes.WATCHING})
        import torch
        print({fakes.WATCHING})
    """
    assert container.output_of(program, **HALF, CARDWISE_FRAMEWORKS="torch,cupy").split() == ["True", "True", "False"]


def test_looking_for_a_framework_is_not_importing_it(container):
    container.install(fakes.CUPY)
    program = """
        import importlib.util, os
        for _ in range(3):
            assert importlib.util.find_spec("cupy") is not None
        assert "CUPY_GPU_MEMORY_LIMIT" not in os.environ
        assert importlib.util.find_spec("torch") is None
        import cupy
        print(cupy.limit)
    """
    assert container.output_of(program, **HALF) == LIMIT


def test_spec_loader_resources_and_reload_stay_what_they_are(container):
    container.install({**fakes.CUPY, "cupy/data.txt": "resource"})
    program = """
        import importlib, importlib.machinery, importlib.resources
        import cupy
        loader = cupy.__spec__.loader
        assert type(loader) is importlib.machinery.SourceFileLoader
        assert "exec_module" not in vars(loader)
        assert importlib.resources.files("cupy").joinpath("data.txt").read_text() == "resource"
        assert importlib.reload(cupy) is cupy
        print(cupy.runs)
    """
    assert container.output_of(program, **HALF) == "2"


def test_a_package_in_a_zip_file_whose_loader_is_that_of_its_neighbours(container):
    with zipfile.ZipFile(container.site / "image.zip", "w") as image:
        for name, source in {**fakes.JAXLIB, "jaxlib/neighbour.py": ""}.items():
            image.writestr(name, textwrap.dedent(source))
    container.path.append(container.site / "image.zip")
    program = """
        import importlib.util
        importlib.util.find_spec("jaxlib.xla_client")
        import jaxlib.neighbour
        from jaxlib import xla_client
        assert xla_client.__spec__.loader is jaxlib.neighbour.__spec__.loader
        print(xla_client.generate_pjrt_gpu_plugin_options())
    """
    assert container.output_of(program, **HALF) == "{'memory_fraction': 0.5}"


def test_an_import_that_fails_fails_as_ever_and_may_be_tried_again(container):
    container.install(
        {
            "cupy/__init__.py": """
                import os
                if "BROKEN" in os.environ:
                    raise OSError("no libcuda.so.1")
                limit = os.environ["CUPY_GPU_MEMORY_LIMIT"]
            """
        }
    )
    program = """
        import os
        try:
            import cupy
        except OSError as error:
            print(error)
        del os.environ["BROKEN"]
        import cupy
        print(cupy.limit)
    """
    assert container.output_of(program, **HALF, BROKEN="1").split("\n") == ["no libcuda.so.1", LIMIT]


@pytest.mark.parametrize("raised", ["SystemExit(3)", "GeneratorExit()", "ValueError('private name is gone')"])
def test_what_the_hook_raises_stays_in_the_hook(container, raised):
    container.install(
        {
            "torch/__init__.py": "from . import cuda",
            "torch/cuda/__init__.py": f"""
        def _lazy_call(call):
            raise {raised}
    """,
        }
    )
    assert container.output_of("import torch; print('goes on')", **HALF) == "goes on"
    done = container.run("import torch", **HALF, CARDWISE_FRAMEWORKS_VERBOSE="1")
    assert f"cardwise: torch: {raised.partition('(')[0]}" in done.stderr


def test_a_framework_without_the_names_that_the_hook_uses(container):
    names = (*_cardwise_finder.HOOK_FILE_BY_MODULE, "jax")
    packages = {f"{part}/__init__.py": "" for name in names for part in parents(name)}
    container.install(packages)
    program = f"import {', '.join(names)}; print('goes on')"
    assert container.output_of(program, **HALF) == "goes on"


def parents(name):
    parts = name.split(".")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


@pytest.mark.parametrize(
    "damage", [{"CARDWISE_MEM_LIMIT_MIB": "lots"}, {"CARDWISE_MEM_FRACTION": "half"}, {"CARDWISE_MEM_FRACTION": ""}]
)
def test_a_damaged_share_is_no_share(container, damage):
    container.install(fakes.CUPY)
    assert container.output_of("import cupy; print(cupy.limit)", **{**HALF, **damage}) == "None"


def test_a_loader_that_takes_no_attribute(container):
    container.install(fakes.CUPY)
    program = """
        import importlib.abc, importlib.machinery, sys

        class Loader:
            __slots__ = ()
            def create_module(self, spec): return None
            def exec_module(self, module): module.limit = "theirs"

        class Finder:
            def find_spec(self, name, path=None, target=None):
                return importlib.machinery.ModuleSpec(name, Loader()) if name == "cupy" else None

        sys.meta_path.insert(1, Finder())
        import cupy
        print(cupy.limit)
    """
    assert container.output_of(program, **HALF) == "theirs"


def test_another_hook_that_asks_all_finders(container):
    """As those of tracers do: theirs asks ours, ours asks theirs."""
    container.install(fakes.CUPY)
    program = """
        import importlib.util, sys

        class Tracer:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if self.busy or name != "cupy":
                    return None
                self.busy = True
                try:
                    spec = importlib.util.find_spec(name)
                finally:
                    self.busy = False
                run = spec.loader.exec_module
                def exec_module(module):
                    run(module)
                    module.traced = True
                spec.loader.exec_module = exec_module
                return spec

        sys.meta_path.insert(int(sys.argv[1]), Tracer())
        import cupy
        print(cupy.limit, cupy.traced)
    """
    (container.work / "tracer.py").write_text(textwrap.dedent(program))
    for place in ("0", "1"):
        done = container.start(["tracer.py", place], **HALF)
        assert done.stdout.split() == [LIMIT, "True"], done.stderr


def test_many_threads_import_and_look_at_once(container):
    container.install({**fakes.CUPY, **fakes.ONNXRUNTIME, **fakes.TORCH})
    program = f"""
        import importlib.util, sys, threading
        gate = threading.Barrier(16)
        problems = []

        def work(number):
            gate.wait()
            try:
                for name in ("cupy", "onnxruntime", "torch"):
                    if number % 2:
                        importlib.util.find_spec(name)
                    __import__(name)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import cupy, torch
        from onnxruntime.capi.onnxruntime_inference_collection import check_and_normalize_provider_args as normal
        print(problems, cupy.runs, cupy.limit, len(torch.cuda.queued), hasattr(normal, "__wrapped__"),
              hasattr(normal.__wrapped__, "__wrapped__"), {fakes.WATCHING})
    """
    printed = container.output_of(program, **HALF, CARDWISE_FRAMEWORKS="cupy,onnxruntime,torch")
    assert printed == f"[] 1 {LIMIT} 1 True False False"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_worker_processes(container, method):
    container.install(fakes.CUPY)
    program = f"""
        import multiprocessing
        def work(number):
            import cupy
            return cupy.limit
        if __name__ == "__main__":
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                print(*pool.map(work, range(4)))
    """
    assert container.output_of(program, **HALF).split() == [LIMIT] * 4


@pytest.mark.parametrize("flag", ["-S", "-E", "-I"])
def test_pythons_that_do_not_load_it_run_as_ever(container, flag):
    container.install({"here.py": ""})
    assert container.output_of("print('runs')", flag, **HALF) == "runs"


def test_a_program_may_replace_sys_path_after_the_start(container):
    container.install(fakes.CUPY)
    program = f"import sys; sys.path[:] = [{str(container.site)!r}]; import cupy; print(cupy.limit)"
    assert container.output_of(program, **HALF) == LIMIT


def test_the_tests_run_where_the_hook_is_not(container):
    assert "_cardwise_finder" not in sys.modules
