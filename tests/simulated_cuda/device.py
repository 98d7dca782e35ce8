"""Installs the simulated device: loads it before torch, and gives torch.cuda and torch.distributed what they lack."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import sys
import zlib
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from simulated_cuda import build, reports

NUM_DEVICES = 8
NCCL_VERSION = (2, 29, 7)
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_TORCH_LIBRARIES = ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python")


def problem() -> str | None:
    """Return why this installation can't have the simulated device, or None. Does not import torch."""
    if sys.platform != "linux":
        return "the simulated device is loaded before Linux's libraries of torch"
    expected = re.search(r"^torch==(\S+)", _CONSTRAINTS.read_text(), re.MULTILINE)
    try:
        found = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    if expected is None or found.partition("+")[0] != expected[1]:
        return f"the simulated device fits torch {expected and expected[1]} of constraints.txt, and this is {found}"
    if "+cu" in found or "+rocm" in found or (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return f"this build of torch, {found}, has CUDA's own devices: the simulated one needs a CPU build"
    return None


def install() -> None:
    """Load the device, import torch, and complete torch.cuda and torch.distributed.

    Raises:
        RuntimeError: It can't be used here, or does not compile.
    """
    assert "torch" not in sys.modules, "torch keeps the devices that it finds when it is imported"
    reason = problem()
    if reason is not None:
        raise RuntimeError(reason)
    path = build.library()
    for name in _TORCH_LIBRARIES:
        ctypes.CDLL(str(_torch_folder() / "lib" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch.distributed  # noqa: F401 - the module's base classes

    native = _import_native(path)
    native.start(NUM_DEVICES, reports.report, reports.place)
    _complete_cuda(native)
    _complete_storages(native)
    _complete_distributed(native)


def set_options(*, checks: bool = True, drops_avoidable_waits: bool = False, traces_places: bool = False) -> None:
    """Set what the device checks in this process.

    Args:
        checks: If False, races and lifetimes are not looked at.
        drops_avoidable_waits: If True, waits that the program did not ask for, such as those of `item()` and blocking
            copies, order nothing, so that they do not hide a wait that is missing elsewhere.
        traces_places: If True, a race names the place of both accesses. Slow.
    """
    _native().set_options(checks, drops_avoidable_waits, traces_places)


def settle() -> None:
    """End all that is in flight, as at the end of a program; a source that was changed under its copy is reported."""
    _native().settle()


def is_installed() -> bool:
    """Return whether this process has the simulated device."""
    return build.NAME in sys.modules


def _native() -> Any:
    return sys.modules[build.NAME]


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _import_native(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(build.NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[build.NAME] = module
    return module


def _complete_cuda(native: Any) -> None:
    import torch

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Any:
            if identity:
                return super().__new__(cls, **identity)
            return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(Stream.record_event(stream))

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def record(self, stream: Any = None) -> None:
            super().record(torch.accelerator.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(torch.accelerator.current_stream() if stream is None else stream)

    def _index(device: Any = None) -> int:
        if device is None or isinstance(device, int):
            return native.current_device() if device is None or device < 0 else device
        index = torch.device(device).index
        return native.current_device() if index is None else index

    def current_stream(device: Any = None) -> Any:
        found = torch.accelerator.current_stream(_index(device))
        return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    def default_stream(device: Any = None) -> Any:
        return Stream(stream_id=0, device_index=_index(device), device_type=1)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[Any]:
        if chosen is None:
            yield None
            return
        before_device, before = native.current_device(), torch.accelerator.current_stream(chosen.device_index)
        torch.accelerator.set_stream(chosen)
        try:
            yield chosen
        finally:
            torch.accelerator.set_stream(before)
            native.set_current_device(before_device)

    class device:
        def __init__(self, chosen: Any) -> None:
            self.index = _index(chosen)

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_current_device(self.index)

        def __exit__(self, *_: object) -> None:
            native.set_current_device(self._before)

    def manual_seed_all(seed: int) -> None:
        for index in range(native.num_devices()):
            native.default_generator(index).manual_seed(seed)

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        native.default_generator(_index(device)).set_state(state)

    class Properties:
        name, major, minor, multi_processor_count = "simulated", 9, 0, 1
        total_memory = native.total_bytes()

    replaced = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # as torch.utils.checkpoint asks, which else keeps no states of its generators
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.num_devices,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_current_device(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),  # dynamo knows it by itself
        "get_rng_state": lambda device="cuda": native.default_generator(_index(device)).get_state(),
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: native.default_generator(native.current_device()).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: native.default_generator(native.current_device()).initial_seed(),
        "default_generators": tuple(native.default_generator(index) for index in range(native.num_devices())),
        "mem_get_info": lambda device=None: (
            native.total_bytes() - native.bytes_in_use(_index(device)),
            native.total_bytes(),
        ),
        "memory_allocated": lambda device=None: native.bytes_in_use(_index(device)),
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: Properties,
        "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
        "get_device_name": lambda device=None: Properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed"):
        setattr(torch.cuda.random, name, replaced[name])


def _complete_storages(native: Any) -> None:
    import torch

    resize_on_host = torch.UntypedStorage.resize_
    clone_on_host = torch.UntypedStorage.clone

    def as_tensor(storage: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(self: Any, num_bytes: int) -> Any:
        if self.device.type != "cuda":
            return resize_on_host(self, num_bytes)
        native.resize_storage(as_tensor(self), num_bytes)
        return self

    def clone(self: Any) -> Any:
        return clone_on_host(self) if self.device.type != "cuda" else as_tensor(self).clone().untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


def _complete_distributed(native: Any) -> None:
    """Make the backend "nccl" available, which takes all branches that torch has for it."""
    import torch.cuda.nccl
    from torch.distributed import distributed_c10d

    torch.cuda.nccl.version = lambda: NCCL_VERSION  # type: ignore[assignment]
    distributed_c10d.ProcessGroupNCCL = native.ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True  # type: ignore[attr-defined]
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)

    def hash_tensors(tensors: list[torch.Tensor]) -> int:
        return sum(zlib.crc32(bytes(tensor.cpu().view(torch.uint8).tolist())) for tensor in tensors)

    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's messages about objects have it.
    torch._C._distributed_c10d._hash_tensors = hash_tensors  # type: ignore[attr-defined]
