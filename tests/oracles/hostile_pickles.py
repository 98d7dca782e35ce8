"""Pickles that run code, or eat memory or stack, when a careless reader opens them; written opcode by opcode."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile


def _text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(module, name, *arguments):
    """Returns a pickle that calls a function by its old opcodes."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(map(_text, arguments)) + b"tR."


def call_by_stack(module, name, *arguments):
    """Returns a pickle that calls a function whose name is data."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93(" + b"".join(map(_text, arguments)) + b"tR."


class _Reduced:
    def __init__(self, function, *arguments):
        self.form = function, arguments

    def __reduce__(self):
        return self.form


def hostile_pickles(marker):
    """Returns pickles by name; those that can run a command would make the file `marker`.

    Args:
        marker: A path.
    """
    touch, python = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    nested = pickle.dumps(_Reduced(eval, python))
    return {
        "os.system": call("os", "system", touch),
        "posix.system": call("posix", "system", touch),
        "os.popen": call("os", "popen", touch),
        "os.execvp": call("os", "execlp", "touch", "touch", str(marker)),
        "subprocess.getoutput": call("subprocess", "getoutput", touch),
        "subprocess.Popen": call("subprocess", "Popen", touch),
        "eval": call("builtins", "eval", python),
        "exec": call("builtins", "exec", python),
        "open": call("builtins", "open", str(marker), "w"),
        "old eval": call("__builtin__", "eval", python),
        "compile": call("builtins", "compile", python, "x", "exec"),
        "import": call("builtins", "__import__", "antigravity"),
        "getattr": call("builtins", "getattr", "x", "__class__"),
        "import_module": call("importlib", "import_module", "this"),
        "runpy": call("runpy", "run_module", "this"),
        "rmtree": call("shutil", "rmtree", f"{marker}-directory"),
        "CDLL": call("ctypes", "CDLL", "libc.so.6"),
        "socket": call("socket", "create_connection"),
        "code": call("code", "interact"),
        "numpy": call("numpy", "load", str(marker)),
        "torch.load": call("torch", "load", str(marker)),
        "torch.hub": call("torch.hub", "load", str(marker), "x"),
        "bytes of a storage": b"\x80\x02ctorch.storage\n_load_from_bytes\nB"
        + struct.pack("<I", len(nested))
        + nested
        + b"\x85R.",
        "stack global": call_by_stack("os", "system", touch),
        "stack global of an attribute": call_by_stack("torch", "os.system", touch),
        "stack global of a module's module": call_by_stack("torch.serialization.os", "system", touch),
        "inst": b"(" + _text(touch) + b"ios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + _text(touch) + b"o.",
        "newobj": b"\x80\x02cos\nsystem\n(" + _text(touch) + b"t\x81.",
        "build": b"\x80\x02ccollections\nOrderedDict\n)R}" + _text("__reduce__") + _text("x") + b"sb.",
        "setitem of a module": b"\x80\x02ctorch\nstorage\n}" + _text("os") + _text("x") + b"sb.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02" + _text(touch) + b"Q.",
        "reduced": pickle.dumps({"a": _Reduced(eval, python)}),
        # Deeper than recursion in C goes: 8 MiB of stack are 140 bytes a level.
        "deep": b"\x80\x02" + b"(" * 60_000 + b"t" * 60_000 + b".",
        "deep lists": b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
        "much": b"\x80\x04B" + struct.pack("<I", 2**31) + b"x.",
        "more": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\1.",
        "no stop": b"\x80\x02}",
        "unknown": b"\x80\x02\xff.",
    }


def as_archive(raw):
    """Returns a pickle as `torch.save` packs it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": raw, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()
