"""Saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from faults.mistakes.models import boosted
from faults.mistakes.wrong_call import CallSite, WrongCall, calling
from torch.optim.lr_scheduler import StepLR

from booster import GeneralCheckpointIO

WORLD_SIZE = 2


def _call(
    what: str, call: Callable[[Any, Any, Any], Any], name: str = "ddp", refusal: str = "ConfigError"
) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, model, optimizer = boosted(name)
        return lambda: call(booster, model, optimizer)

    return WrongCall(name=f"{name}: {what}" if name != "ddp" else what, prepare=prepare, refusal=refusal)


def _no_place(what: str, call: Callable[[Any, Any, Any], Any]) -> WrongCall:
    """A path at which there is nothing, or can't be: an error of the file system's kind."""
    return _call(what, call, refusal="CheckpointError")


def _of_scheduler(what: str, call: Callable[[Any, Any], Any]) -> WrongCall:
    def prepare(_: CallSite) -> Callable[[], Any]:
        booster, _model, optimizer = boosted()
        scheduler = StepLR(optimizer, 1)
        return lambda: call(booster, scheduler)

    return WrongCall(name=what, prepare=prepare)


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [
        _call("save(model, optimizer) without a path", lambda b, m, o: b.save(m, o)),
        _call("save('')", lambda b, m, o: b.save("", m, o)),
        _call("save() of a model that is not boosted", lambda b, m, o: b.save("c", m.unwrap())),
        _call("save() of two models in a list", lambda b, m, o: b.save("c", [m, m])),
        _call("save() with an optimizer that was boosted", lambda b, m, o: b.save("c", m, o.optim)),
        _call("save() with the loader as scheduler", lambda b, m, o: b.save("c", m, o, [1])),
        _call("save() with a loader without a position", lambda b, m, o: b.save("c", m, o, None, [1])),
        _call("save() with a dict's key 3", lambda b, m, o: b.save("c", {3: m})),
        _call("save() with a dict's key 'a/b'", lambda b, m, o: b.save("c", {"a/b": m})),
        _call("save() with a dict's key 'latest'", lambda b, m, o: b.save("c", {"latest": m})),
        _call("save(step=-1)", lambda b, m, o: b.save("c", m, o, step=-1)),
        _call("save(step='7')", lambda b, m, o: b.save("c", m, o, step="7")),
        _call("save(step=1.5)", lambda b, m, o: b.save("c", m, o, step=1.5)),
        _call("save(keep_last=2) without a step", lambda b, m, o: b.save("c", m, o, keep_last=2)),
        _call("save(keep_last=0)", lambda b, m, o: b.save("c", m, o, step=1, keep_last=0)),
        _call("save(size_per_shard=0)", lambda b, m, o: b.save("c", m, o, size_per_shard=0)),
        _call("save(size_per_shard='1Gb')", lambda b, m, o: b.save("c", m, o, size_per_shard="1Gb")),
        _call("save(use_safetensors='no')", lambda b, m, o: b.save("c", m, o, use_safetensors="no")),
        _call("save(use_async='yes')", lambda b, m, o: b.save("c", m, o, use_async="yes")),
        _call("save_model('out.ckpt')", lambda b, m, o: b.save_model(m, "out.ckpt")),
        _no_place("save_model() below a file", lambda b, m, o: b.save_model(m, "/dev/null/out", shard=True)),
        _no_place("save_model() below no file system", lambda b, m, o: b.save_model(m, "/proc/none/out", shard=True)),
        _call(
            "save_model('out.bin', use_safetensors=True)",
            lambda b, m, o: b.save_model(m, "out.bin", use_safetensors=True),
        ),
        _call(
            "save_model('out.safetensors', use_safetensors=False)",
            lambda b, m, o: b.save_model(m, "o.safetensors", use_safetensors=False),
        ),
        _call(
            "save_model(gather_dtensor=False)", lambda b, m, o: b.save_model(m, "out", shard=True, gather_dtensor=False)
        ),
        _call(
            "save_model('out.safetensors', prefix='a')", lambda b, m, o: b.save_model(m, "out.safetensors", prefix="a")
        ),
        _call("save_model(prefix='a/b')", lambda b, m, o: b.save_model(m, "out", shard=True, prefix="a/b")),
        _call("save_model(shard='yes')", lambda b, m, o: b.save_model(m, "out", shard="yes")),
        _call(
            "save_model() of a model that is not boosted", lambda b, m, o: b.save_model(m.unwrap(), "out", shard=True)
        ),
        _call("save_model('out', model)", lambda b, m, o: b.save_model("out", m)),
        _call("save_model(checkpoint=3)", lambda b, m, o: b.save_model(m, 3)),
        _call("save_optimizer() of the model", lambda b, m, o: b.save_optimizer(m, "o.bin")),
        _call("save_optimizer() of the boosted optimizer's own", lambda b, m, o: b.save_optimizer(o.optim, "o.bin")),
        _call(
            "save_optimizer(size_per_shard=-0.5)",
            lambda b, m, o: b.save_optimizer(o, "o", shard=True, size_per_shard=-0.5),
        ),
        _call("save_lr_scheduler() of an optimizer", lambda b, m, o: b.save_lr_scheduler(o, "s.json")),
        _of_scheduler("save_lr_scheduler() into a directory", lambda b, s: b.save_lr_scheduler(s, ".")),
        _of_scheduler("save_lr_scheduler(checkpoint=None)", lambda b, s: b.save_lr_scheduler(s, None)),
        _call("load(model, optimizer) without a path", lambda b, m, o: b.load(m, o)),
        _no_place("load() of a folder that does not exist", lambda b, m, o: b.load("runs/none", m, o)),
        _no_place("load() of a folder with other files", lambda b, m, o: b.load(".", m, o)),
        _call("load(verify='fast')", lambda b, m, o: b.load("c", m, verify="fast")),
        _call("load() of a model that is not boosted", lambda b, m, o: b.load("c", m.unwrap())),
        _call("load(strict='no')", lambda b, m, o: b.load("c", m, strict="no")),
        _call("load_model(verify='fast')", lambda b, m, o: b.load_model(m, "c", verify="fast")),
        _call("load_model() of a model that is not boosted", lambda b, m, o: b.load_model(m.unwrap(), "c")),
        _call("load_model(checkpoint=3)", lambda b, m, o: b.load_model(m, 3)),
        _call("load_model(checkpoint='')", lambda b, m, o: b.load_model(m, "")),
        _call("load_optimizer() of the model", lambda b, m, o: b.load_optimizer(m, "c")),
        _call("load_lr_scheduler() of the model", lambda b, m, o: b.load_lr_scheduler(m, "c")),
        _of_scheduler("load_lr_scheduler() from a directory", lambda b, s: b.load_lr_scheduler(s, ".")),
        _call("save(size_per_shard=0)", lambda b, m, o: b.save("c", m, o, size_per_shard=0), "gemini"),
        _call("save() of a model that is not boosted", lambda b, m, o: b.save("c", torch.nn.Linear(3, 3)), "fsdp"),
        _call("load(verify=None)", lambda b, m, o: b.load("c", m, verify=None), "tensor"),
        calling(GeneralCheckpointIO, timeout_seconds=0),
        calling(GeneralCheckpointIO, timeout_seconds="60"),
        calling(GeneralCheckpointIO, group=3),
    ]
