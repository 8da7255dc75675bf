"""TensorFlow: sets a memory limit on each GPU just before TensorFlow fixes its devices.

An earlier limit would conflict with the program's own calls: set_memory_growth raises on a GPU that has a logical
device configuration. A later limit is impossible. The hook acts according to the program's own settings at that moment:

- a logical device configuration, or a fraction in a ConfigProto: the hook does nothing;
- memory growth: the hook sets per_process_gpu_memory_fraction, up to which the memory may grow;
- nothing: each visible GPU gets one logical device with the share as memory_limit.

If a session has its own ConfigProto, the session gets a copy of it with the fraction added. Python 3.7 and above.
"""

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# An attribute of a context: the GPUs whose logical device configuration the hook has set.
_LIMITED_GPUS = "_cardwise_gpus"


def after_import(module: "Any", share: "Any") -> None:
    """Wrap the function that initialises eager TensorFlow, or the function that starts a session."""
    if module.__name__.endswith(".context"):
        _wrap_context(module, share)
    else:
        _wrap_sessions(module, share)


def _wrap_context(module: "Any", share: "Any") -> None:
    original = module.Context.ensure_initialized

    @functools.wraps(original)
    def ensure_initialized(self: "Any") -> "Any":
        if not getattr(self, "_initialized", True):
            _limit_context(module, self, share)
        return original(self)

    module.Context.ensure_initialized = ensure_initialized
    _keep_growth_error(module.Context)


def _keep_growth_error(context_class: "Any") -> None:
    """Make set_memory_growth raise RuntimeError if the program calls it too late.

    TensorFlow's guide recommends to catch RuntimeError. Without this function TensorFlow would raise ValueError because
    of the logical device configuration, which the hook, not the program, has created.
    """
    original = context_class.set_memory_growth

    @functools.wraps(original)
    def set_memory_growth(self: "Any", dev: "Any", enable: bool) -> "Any":
        if dev not in getattr(self, _LIMITED_GPUS, ()):
            return original(self, dev, enable)
        configuration = self._virtual_device_map.pop(dev)
        try:
            return original(self, dev, enable)
        finally:
            if self._context_handle is not None:
                self._virtual_device_map[dev] = configuration

    context_class.set_memory_growth = set_memory_growth


def _wrap_sessions(module: "Any", share: "Any") -> None:
    original = module.BaseSession.__init__

    @functools.wraps(original)
    def init(self: "Any", target: "Any" = "", graph: "Any" = None, config: "Any" = None) -> None:
        if config is None:
            # Without a fraction in the ConfigProto, TensorFlow uses the fraction of the context.
            _limit_context(module.context, module.context.context(), share)
        else:
            config = _with_fraction(config, share)
        original(self, target, graph, config)

    module.BaseSession.__init__ = init


def _limit_context(module: "Any", context: "Any", share: "Any") -> None:
    """Limit the memory of the context to the share, unless the program has set a limit."""
    try:
        gpus = [] if context._context_handle is not None else context.get_visible_devices("GPU")
        if not gpus or any(context.get_logical_device_configuration(gpu) is not None for gpu in gpus):
            return
        own_config = context._config if context._config is not None else module.config_pb2.ConfigProto()
        if _has_memory_limit(own_config):
            return
        if any(context.get_memory_growth(gpu) for gpu in gpus):
            context._config = _with_fraction(own_config, share)
            return
        for gpu in gpus:
            limit = module.LogicalDeviceConfiguration(memory_limit=share.limit_mib)
            context.set_logical_device_configuration(gpu, [limit])
        setattr(context, _LIMITED_GPUS, frozenset(gpus))
    except Exception as problem:  # another thread was faster, or this TensorFlow has other names
        share.log("tensorflow", repr(problem))


def _has_memory_limit(config: "Any") -> bool:
    options = config.gpu_options
    return bool(options.per_process_gpu_memory_fraction or options.experimental.virtual_devices)


def _with_fraction(config: "Any", share: "Any") -> "Any":
    """Return a copy of `config` with the fraction; `config` itself if it limits memory, or is not a ConfigProto."""
    try:
        if _has_memory_limit(config):
            return config
        copy = type(config)()
        copy.CopyFrom(config)
        copy.gpu_options.per_process_gpu_memory_fraction = share.fraction
    except Exception as problem:
        share.log("tensorflow", repr(problem))
        return config
    return copy
