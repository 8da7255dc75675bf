"""TensorFlow: a memory limit on each GPU, set in the last moment before TensorFlow fixes its devices.

Earlier would clash with the program's own calls: set_memory_growth raises on a GPU that has a logical device
configuration. Later is impossible. In that moment it is known what the program has set:

- a logical device configuration, or a fraction in a ConfigProto: nothing is done;
- memory growth: it grows as before, up to per_process_gpu_memory_fraction, which goes with growth;
- nothing: each visible GPU gets one logical device with the share as memory_limit.

A session with a ConfigProto of its own gets the fraction in a copy of it. Python 3.7 and above.
"""

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# An attribute of a context: the GPUs whose logical device configuration is ours.
_OURS = "_cardwise_gpus"


def after(module: "Any", share: "Any") -> None:
    """Wrap the one place where eager TensorFlow initialises, or the one where sessions begin."""
    if module.__name__.endswith(".context"):
        _watch_context(module, share)
    else:
        _watch_sessions(module, share)


def _watch_context(module: "Any", share: "Any") -> None:
    original = module.Context.ensure_initialized

    @functools.wraps(original)
    def ensure_initialized(self: "Any") -> "Any":
        if not getattr(self, "_initialized", True):
            _settle(module, self, share)
        return original(self)

    module.Context.ensure_initialized = ensure_initialized
    _keep_growth_error(module.Context)


def _keep_growth_error(context_class: "Any") -> None:
    """Let a program that sets memory growth too late get the RuntimeError that TensorFlow's guide teaches to catch,
    and not the ValueError of a GPU with a logical device configuration: it has made none.
    """
    original = context_class.set_memory_growth

    @functools.wraps(original)
    def set_memory_growth(self: "Any", dev: "Any", enable: bool) -> "Any":
        if dev not in getattr(self, _OURS, ()):
            return original(self, dev, enable)
        configuration = self._virtual_device_map.pop(dev)
        try:
            return original(self, dev, enable)
        finally:
            if self._context_handle is not None:
                self._virtual_device_map[dev] = configuration

    context_class.set_memory_growth = set_memory_growth


def _watch_sessions(module: "Any", share: "Any") -> None:
    original = module.BaseSession.__init__

    @functools.wraps(original)
    def begin(self: "Any", target: "Any" = "", graph: "Any" = None, config: "Any" = None) -> None:
        if config is None:
            # TensorFlow takes the context's then.
            _settle(module.context, module.context.context(), share)
        else:
            config = _with_fraction(config, share)
        original(self, target, graph, config)

    module.BaseSession.__init__ = begin


def _settle(module: "Any", context: "Any", share: "Any") -> None:
    """Give the context the share, if the program has left that open."""
    try:
        gpus = [] if context._context_handle is not None else context.get_visible_devices("GPU")
        if not gpus or any(context.get_logical_device_configuration(gpu) is not None for gpu in gpus):
            return
        own = context._config if context._config is not None else module.config_pb2.ConfigProto()
        if _sizes_memory(own):
            return
        if any(context.get_memory_growth(gpu) for gpu in gpus):
            context._config = _with_fraction(own, share)
            return
        for gpu in gpus:
            limit = module.LogicalDeviceConfiguration(memory_limit=share.limit_mib)
            context.set_logical_device_configuration(gpu, [limit])
        setattr(context, _OURS, frozenset(gpus))
    except Exception as problem:  # another thread was first, or a TensorFlow that names these things otherwise
        share.say("tensorflow", repr(problem))


def _sizes_memory(config: "Any") -> bool:
    options = config.gpu_options
    return bool(options.per_process_gpu_memory_fraction or options.experimental.virtual_devices)


def _with_fraction(config: "Any", share: "Any") -> "Any":
    """A copy with the fraction; `config` itself where it sizes memory, or is no ConfigProto at all."""
    try:
        if _sizes_memory(config):
            return config
        copy = type(config)()
        copy.CopyFrom(config)
        copy.gpu_options.per_process_gpu_memory_fraction = share.fraction
    except Exception as problem:
        share.say("tensorflow", repr(problem))
        return config
    return copy
