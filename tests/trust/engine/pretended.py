"""vLLM as on a GPU that is not here, to ask its model classes what KV cache they need: a Hopper,
whose tensors are on the meta device. Nothing is computed.

:func:`pretend` has to be called before anything else of vLLM is imported. Of vLLM it replaces what
asks a driver or a device: the platform, CUDA's streams and events, and the process in which vLLM
looks at a model class.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Modules of a build for GPUs. vLLM takes what can be imported for a kernel that is there."""
_PACKAGES = ("cutlass", "cuda", "deep_gemm", "torchvision")
"""Packages that model files import for kernels and for what is before a language model."""


class _Anything(type):
    """A class that has whatever is asked of it."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stand

    def __getitem__(cls, item):
        return cls


class _Stand(metaclass=_Anything):
    """For a stream, an event, a kernel, a decorator: any call is answered."""

    def __init__(self, *arguments, **named):
        return

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stand()

    def __call__(self, *arguments, **named):
        return _Stand()


class _Module(ModuleType):
    """Whatever is asked of it is there."""

    __path__: list[str] = []  # noqa: RUF012 as a package's

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stand


class _Packages(MetaPathFinder, Loader):
    """Finds what is not installed. It is asked last."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in _PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        return


def pretend():
    """From now on vLLM in this process is on a Hopper."""
    for name in _COMPILED:
        sys.modules.setdefault(name, _Module(name))
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # it remembers that it is not
    sys.meta_path.append(_Packages())
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):  # type: ignore[misc]
        """Asks no driver."""

        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        get_cuda_runtime_major = classmethod(lambda cls: 12)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        device_count = classmethod(lambda cls: 1)
        is_pin_memory_available = classmethod(lambda cls: False)
        import_kernels = classmethod(lambda cls: None)
        check_if_supports_dtype = classmethod(lambda cls, dtype: None)
        set_device = classmethod(lambda cls, device: None)
        current_device = classmethod(lambda cls: META)

    platforms._current_platform = Hopper()
    _give_triton_a_backend()
    from vllm import _custom_ops as kernels

    for name in (one for one in vars(kernels) if "supports" in one):
        setattr(kernels, name, lambda *arguments: True)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Stand)
    _look_at_classes_here()


def _give_triton_a_backend():
    """Its kernels are declared, and never run. vLLM looks for a backend by its name only."""
    from triton import backends

    class Here:
        @staticmethod
        def is_active():
            return False

    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=Here))


def _look_at_classes_here():
    """vLLM imports a model class in a process of its own first, of which each takes seconds."""
    from vllm.model_executor.models import registry

    def inspect_model_cls(self):
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect_model_cls


class _OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """What is made on a device, or moved there, is on the meta device."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = dict(named or {})
        if function is torch.Tensor.cuda:
            return arguments[0].to(META)
        if function is torch.Tensor.item and arguments[0].is_meta:
            return 1.0 if arguments[0].is_floating_point() else 1
        if _is_cuda(named.get("device")):
            named["device"] = META
        if function is torch.Tensor.to:
            arguments = tuple(META if _is_cuda(one) else one for one in arguments)
        return function(*arguments, **named)


def _is_cuda(device):
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


@contextmanager
def on_meta():
    """Tensors are made on the meta device, in bfloat16, and every kernel is there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with _OnMeta(), META, _every_kernel():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _every_kernel():
    space: Any = torch._ops._OpNamespace
    found = space.__getattr__

    def lenient(self, name):
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return _Stand()

    space.__getattr__ = lenient
    try:
        yield
    finally:
        space.__getattr__ = found


def alone(config, folder):
    """The only rank of a world of its own. Once a process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"file://{folder / 'world'}", 0, backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")
