"""What TorchFSDPPlugin uses of torch's FSDP2 and torch does not promise: each name exists, as it is used."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

    from booster.plugins.torch_fsdp import fsdp2_internals
except ImportError as error:
    raise AssertionError(f"torch {torch.__version__} has moved what fsdp2_internals.py imports: {error}") from error

FOLDER = Path(fsdp2_internals.__file__).parent
# How fsdp2_internals.py names FSDP2's objects.
FSDP2_OBJECTS = ("fsdp_param", "_group", "_state", "group", "state", "info")
CLASSES = {
    "FSDPParam": _fsdp_param.FSDPParam,
    "FSDPParamGroup": _fsdp_param_group.FSDPParamGroup,
    "FSDPState": _fsdp_state.FSDPState,
    "AllGather": fsdp2_internals.AllGather,
    "FSDPModule": FSDPModule,
}
SIGNATURES = {
    ("FSDPParam", "_setattr_on_modules"): ["self", "param"],
    ("FSDPParam", "to_sharded_dtensor"): ["self", "tensor"],
    ("FSDPParamGroup", "post_backward"): ["self", "*unused"],
    ("FSDPParamGroup", "_register_post_backward_hook"): ["self", "args", "kwargs"],
    ("FSDPParamGroup", "_to_sharded"): ["self"],
    ("FSDPParamGroup", "finalize_backward"): ["self"],
    ("FSDPParamGroup", "_to_sharded_post_forward"): ["self"],
    ("FSDPState", "_pre_forward"): ["self", "module", "args", "kwargs"],
    ("FSDPState", "_post_forward"): ["self", "module", "input", "output"],
    ("FSDPState", "_lazy_init"): ["self"],
    ("AllGather", "allocate"): ["self", "size", "dtype", "device"],
    ("AllGather", "__call__"): ["self", "output_tensor", "input_tensor", "group", "async_op"],
    ("FSDPModule", "set_custom_all_gather"): ["self", "comm"],
    ("FSDPModule", "set_requires_gradient_sync"): ["self", "requires_gradient_sync", "recurse"],
    ("FSDPModule", "set_reshard_after_forward"): ["self", "reshard_after_forward", "recurse"],
    ("FSDPModule", "unshard"): ["self", "async_op"],
}


def changed(what: str) -> str:
    return f"torch {torch.__version__} has changed {what}, which plugins/torch_fsdp/fsdp2_internals.py relies on"


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def sharded():
    net = Net()
    fully_shard(net.inner)
    fully_shard(net)
    fsdp2_internals.initialize_root(net)
    return net


def accessed(names):
    """The attributes that fsdp2_internals.py reads or sets of FSDP2's objects, by what it calls them."""
    found = {name: set() for name in names}
    for node in ast.walk(ast.parse((FOLDER / "fsdp2_internals.py").read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if owner in found:
                found[owner].add(node.attr)
    return found


def test_every_attribute_exists():
    net = sharded()
    net(torch.ones(1, 3)).sum().backward()  # some are set by the first all-gather
    state = net.inner._get_fsdp_state()
    (fsdp2,) = fsdp2_internals.fsdp2_param_groups(net.inner)
    group = fsdp2._group
    param = group.fsdp_params[0]
    objects = {
        "fsdp_param": param,
        "_group": group,
        "_state": state,
        "group": group,
        "state": state,
        "info": param._module_info,
    }
    found = accessed(FSDP2_OBJECTS)
    assert all(found.values()), f"names of FSDP2's objects that fsdp2_internals.py no longer uses: {found}"
    for name, attributes in found.items():
        for attribute in attributes - {"_fsdp_param_group"}:  # that of torch before 2.12
            what = f"{type(objects[name]).__name__}.{attribute}"
            assert hasattr(objects[name], attribute), changed(what)
    assert hasattr(param, "_unsharded_param"), changed("FSDPParam._unsharded_param")
    for name in fsdp2_internals._HOOKS:
        assert hasattr(net, name), changed(f"Module.{name}")


@pytest.mark.parametrize(("cls", "name"), SIGNATURES)
def test_every_signature_is_as_it_is_called(cls, name):
    expected = SIGNATURES[cls, name]
    assert hasattr(CLASSES[cls], name), changed(f"{cls}.{name}")
    parameters = inspect.signature(getattr(CLASSES[cls], name)).parameters.values()
    found = [str(one).split(":")[0].split("=")[0] for one in parameters]
    assert found == expected, changed(f"{cls}.{name}({', '.join(expected)}) to {found}")


def test_no_other_module_of_the_folder_uses_what_is_private():
    private = ("_fully_shard", "_get_fsdp_state", "_composable", "_fsdp_param", "fsdp._common_utils", ".fsdp_param.")
    for path in FOLDER.glob("*.py"):
        if path.name != "fsdp2_internals.py":
            text = path.read_text()
            assert not [word for word in private if word in text], f"{path.name}: move it to fsdp2_internals.py"


def test_replaced_methods_are_called_by_fsdp2():
    net = sharded()
    calls, taken = [], []
    for module in (net.inner, net):
        (fsdp2,) = fsdp2_internals.fsdp2_param_groups(module)

        def register(args, kwargs, module=module):
            calls.append(("register", type(module).__name__))
            return args, kwargs

        def post_backward(*_, module=module, fsdp2=fsdp2):
            calls.append(("post-backward", type(module).__name__))
            grads = [one._unsharded_param.grad for one in fsdp2.fsdp_params]
            for one in fsdp2.fsdp_params:
                one._unsharded_param.grad = None
            taken.extend(grads)
            fsdp2.post_backward()

        fsdp2.replace_backward(post_backward, register, lambda: None)
    net(torch.ones(1, 3)).sum().backward()
    wanted = {(what, name) for what in ("register", "post-backward") for name in ("FSDPNet", "FSDPLinear")}
    assert set(calls) == wanted, changed(f"what calls FSDPParamGroup.post_backward: {calls}")
    assert [one is not None for one in taken].count(True) == 4, changed("where FSDP2 accumulates gradients")
    for name, parameter in net.named_parameters():
        assert parameter.grad is None, changed(f"FSDPParamGroup.post_backward, which reduced a gradient of {name}")


def test_parameters_are_shown_by_the_replaced_method():
    net = sharded()
    (fsdp2,) = fsdp2_internals.fsdp2_param_groups(net)
    shown = []
    for fsdp_param in fsdp2.fsdp_params:

        def show(parameter, fsdp_param=fsdp_param):
            shown.append(parameter)
            type(fsdp_param)._setattr_on_modules(fsdp_param, parameter)

        fsdp_param._setattr_on_modules = show
    net(torch.ones(1, 3))
    assert len(shown) == len(fsdp2.fsdp_params), changed(f"what calls FSDPParam._setattr_on_modules: {len(shown)}")
    fsdp2.reshard()
    assert shown[-1] is fsdp2.fsdp_params[-1].sharded_param, changed("FSDPParam.to_sharded")


def test_a_detached_model_is_the_users_own_and_comes_back():
    net = sharded()
    hooks = {name: len(getattr(net, name)) for name in fsdp2_internals._HOOKS}
    user = net.register_forward_hook(lambda *_: None)
    with fsdp2_internals.detached_from_fsdp(net):
        assert [type(one) for one in net.modules()] == [Net, nn.Linear, nn.Linear], changed("the class of modules")
        assert list(net._forward_hooks) == [user.id], changed("FSDP2's forward hooks")
        assert not net._forward_pre_hooks, changed("FSDP2's forward pre-hooks")
        assert not [key for key in vars(net) if "composable" in key], changed("the state of a module")
    user.remove()
    assert isinstance(net, FSDPModule)
    assert {name: len(getattr(net, name)) for name in fsdp2_internals._HOOKS} == hooks
    net(torch.ones(1, 3)).sum().backward()
