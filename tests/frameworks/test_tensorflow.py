"""The real TensorFlow (CPU build): the memory limit that it says it has, and that programs with their own settings win.

The double: TensorFlow is told of GPUs by `TF_ListPhysicalDevices`. All of its Python, and the configuration that it
hands to its run time, is real. Unproved without a GPU: that its allocator keeps to the limit.
"""

import pytest

GPUS = """
    import json
    import tensorflow as tf
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import context
    devices = [b"/physical_device:CPU:0", b"/physical_device:GPU:0", b"/physical_device:GPU:1"]
    pywrap_tfe.TF_ListPhysicalDevices = lambda: devices

    def handed():
        "What the run time was, or is to be, started with."
        options = context.context().config.gpu_options
        return {
            "limits": [list(device.memory_limit_mb) for device in options.experimental.virtual_devices],
            "fraction": options.per_process_gpu_memory_fraction,
            "growth": options.allow_growth,
        }

    def told(gpus):
        return [[c.memory_limit for c in tf.config.get_logical_device_configuration(gpu) or []] for gpu in gpus]
"""


def program(*lines):
    return GPUS + "".join(f"\n    {line}" for line in lines)


def test_a_program_that_sets_nothing_has_the_share_as_its_limit(container):
    answer = container.answers(
        program(
            "gpus = tf.config.list_physical_devices('GPU')",
            "before = told(gpus)",
            "assert tf.reduce_sum(tf.ones(3)).numpy() == 3",
            "print(json.dumps([before, told(gpus), handed()]))",
        )
    )
    assert answer == [
        [[], []],
        [[8138], [8138]],
        {"limits": [[8138], [8138]], "fraction": 0.0, "growth": False},
    ]


def test_without_the_hook_there_is_no_limit(container):
    """The double and the questions are not what sets it."""
    answer = container.answers(
        program("assert tf.reduce_sum(tf.ones(3)).numpy() == 3", "print(json.dumps(handed()))"),
        CARDWISE_FRAMEWORKS="off",
    )
    assert answer == {"limits": [], "fraction": 0.0, "growth": False}


OWN = {
    "logical devices": (
        "tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=100)])",
        {"limits": [[100], []], "fraction": 0.0, "growth": False},
    ),
    "logical devices, two of one": (
        "[tf.config.set_logical_device_configuration(g, 2 * [tf.config.LogicalDeviceConfiguration(64)]) for g in gpus]",
        {"limits": [[64, 64], [64, 64]], "fraction": 0.0, "growth": False},
    ),
    # It grows as the program wants, up to the share.
    "memory growth": (
        "[tf.config.experimental.set_memory_growth(gpu, True) for gpu in gpus]",
        {"limits": [], "fraction": 0.5, "growth": True},
    ),
    "no GPU visible": (
        "tf.config.set_visible_devices([], 'GPU')",
        {"limits": [], "fraction": 0.0, "growth": False},
    ),
}


@pytest.mark.parametrize("own", OWN)
def test_a_programs_own_settings_win(container, own):
    call, expected = OWN[own]
    answer = container.answers(
        program(
            "gpus = tf.config.list_physical_devices('GPU')",
            call,
            "assert tf.reduce_sum(tf.ones(3)).numpy() == 3",
            "print(json.dumps(handed()))",
        )
    )
    assert answer == expected


def test_settings_that_come_too_late_raise_what_they_raise_without_the_hook(container):
    """TensorFlow's guide catches RuntimeError; a ValueError would end such a program."""
    lines = (
        "gpus = tf.config.list_physical_devices('GPU')",
        "assert tf.reduce_sum(tf.ones(3)).numpy() == 3",
        "raised = []",
        "calls = [lambda: tf.config.experimental.set_memory_growth(gpus[0], True),",
        "         lambda: tf.config.experimental.set_memory_growth(gpus[0], False),",
        "         lambda: tf.config.set_visible_devices([], 'GPU'),",
        "         lambda: tf.config.set_logical_device_configuration(",
        "             gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=1)])]",
        "for call in calls:",
        "    try:",
        "        call()",
        "        raised.append('')",
        "    except Exception as error:",
        "        raised.append(repr(error))",
        "print(json.dumps(raised))",
    )
    hooked = container.answers(program(*lines))
    assert hooked == container.answers(program(*lines), CARDWISE_FRAMEWORKS="off")
    assert [error.partition("(")[0] for error in hooked] == ["RuntimeError"] * 4


SESSIONS = {
    "no ConfigProto": ("None", {"limits": [[8138], [8138]], "fraction": 0.0, "growth": False}),
    "the article's fraction": (
        "v1.ConfigProto(gpu_options=v1.GPUOptions(per_process_gpu_memory_fraction=0.25))",
        {"limits": [], "fraction": 0.25, "growth": False},
    ),
    "memory growth": (
        "v1.ConfigProto(gpu_options=v1.GPUOptions(allow_growth=True))",
        {"limits": [], "fraction": 0.5, "growth": True},
    ),
    "something else": ("v1.ConfigProto(log_device_placement=False)", {"limits": [], "fraction": 0.5, "growth": False}),
}


@pytest.mark.parametrize("own", SESSIONS)
def test_sessions_of_version_1(container, own):
    config, expected = SESSIONS[own]
    answer = container.answers(
        program(
            "v1 = tf.compat.v1",
            "v1.disable_eager_execution()",
            f"config = {config}",
            "copy = config and config.SerializeToString()",
            "with v1.Session(config=config) as session:",
            "    assert session.run(tf.constant(1) + 1) == 2",
            "assert config is None or config.SerializeToString() == copy",
            "options = session._config.gpu_options",
            "print(json.dumps({",
            "    'limits': [list(d.memory_limit_mb) for d in options.experimental.virtual_devices],",
            "    'fraction': options.per_process_gpu_memory_fraction, 'growth': options.allow_growth}))",
        )
    )
    assert answer == expected


def test_a_wrong_config_gets_tensorflows_own_error(container):
    done = container.run(program("tf.compat.v1.disable_eager_execution()", "tf.compat.v1.Session(config='fast')"))
    assert "TypeError: Argument `config` must be a tf.ConfigProto" in done.stderr


def test_keras_trains_on_the_unpatched_cpu(container):
    answer = container.answers("""
        import json, keras, numpy
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        history = model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), epochs=2, verbose=0)
        print(json.dumps(len(history.history["loss"])))
    """)
    assert answer == 2


def test_threads_that_use_tensorflow_at_once(container):
    answer = container.answers(
        program(
            "import threading",
            "gate, sums = threading.Barrier(8), []",
            "def work():",
            "    gate.wait()",
            "    sums.append(float(tf.reduce_sum(tf.ones(3))))",
            "threads = [threading.Thread(target=work) for _ in range(8)]",
            "[thread.start() for thread in threads]",
            "[thread.join() for thread in threads]",
            "print(json.dumps([sums, handed()['limits']]))",
        )
    )
    assert answer == [[3.0] * 8, [[8138], [8138]]]
