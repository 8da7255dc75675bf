"""The real JAX (CPU build): the options that jaxlib makes for its GPU plugin.

`generate_pjrt_gpu_plugin_options` is the function that JAX's CUDA plugin calls when it starts; the plugin itself needs
a GPU. Unproved without one: that the plugin allocates by them.
"""

OPTIONS = """
    import json, os
    import jax
    from jaxlib import xla_client

    def fraction():
        return xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction")
"""


def program(*lines):
    return OPTIONS + "".join(f"\n    {line}" for line in lines)


SHOW = "print(json.dumps([fraction(), sorted(name for name in os.environ if name.startswith('XLA'))]))"


def test_a_program_that_sets_nothing(container):
    assert container.answers(program("assert jax.numpy.ones(3).sum() == 3", SHOW)) == [0.5, []]


def test_without_the_hook_there_is_none(container):
    assert container.answers(program(SHOW), CARDWISE_FRAMEWORKS="off") == [None, []]


def test_the_pods_variable_stays(container):
    answer = container.answers(program(SHOW), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert answer == [0.5, ["XLA_PYTHON_CLIENT_MEM_FRACTION"]]


def test_a_programs_own_fraction_wins_by_either_name(container):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert container.answers(program(f"os.environ[{name!r}] = '0.2'", SHOW)) == [0.2, [name]]


def test_a_programs_new_name_beside_the_pods_old_one(container):
    """JAX refuses both; that program has set one."""
    lines = ("os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.2'", "print(json.dumps(fraction()))")
    assert container.answers(program(*lines), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5") == 0.2
    plain = container.run(program(*lines), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5", CARDWISE_FRAMEWORKS="off")
    assert "ValueError: XLA_CLIENT_MEM_FRACTION is specified together" in plain.stderr


def test_a_spawned_worker(container):
    answer = container.answers("""
        import json, multiprocessing

        def work(number):
            from jaxlib import xla_client
            return xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(json.dumps(pool.map(work, range(2))))
    """)
    assert answer == [0.5, 0.5]
