"""A CPU build of torch that believes in eight CUDA devices, without memory or operators: for fake tensors only.

Import before torch. An operator on a fake "cuda" tensor and one of the CPU raises, as the real operator would.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so")


def install() -> None:
    """Build and load the device, import torch, and replace what torch.cuda lacks in a CPU build."""
    assert "torch" not in sys.modules, "torch keeps the devices that it finds when it is imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    base = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/fake_cuda.so"
        command = ["g++", "-std=c++20", "-w", "-shared", "-fPIC", str(SOURCE), f"-I{base}/include", "-o", library]
        subprocess.run(command, check=True)
        for path in (*(str(base / "lib" / name) for name in _LIBRARIES), library):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    import torch

    class Stream(torch.Stream):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(cls, stream_id=0, device_index=0, device_type=1)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(Event())

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    class Event(torch.Event):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(cls, "cuda")

        def record(self, stream: Any = None) -> None:
            pass

        def wait(self, stream: Any = None) -> None:
            pass

    replaced = {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": lambda _: nullcontext(),
        "mem_get_info": lambda _=None: (2**30, 2**30),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # torch.cuda.is_available() stays False: without a driver, torch.tensor(..., device="cuda") goes through the CPU.
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_stream = Stream  # type: ignore[assignment]
