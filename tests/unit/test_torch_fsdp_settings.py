"""TorchFSDPPlugin's arguments: what each means for FSDP2, and what can't be, with what to write instead."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.modules.batchnorm import _BatchNorm

from booster.errors import ConfigError
from booster.mixed_precision import BF16MixedPrecision
from booster.plugins.base import arguments_of
from booster.plugins.torch_fsdp.config import FSDPConfig, PrecisionDtypes, check_reshard_after_forward
from booster.plugins.torch_fsdp.mesh import make_mesh

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
DEFAULTS = {
    "process_group": None,
    "sharding_strategy": "FULL_SHARD",
    "cpu_offload": None,
    "auto_wrap_policy": None,
    "mixed_precision": None,
    "ignored_modules": None,
    "param_init_fn": None,
    "sync_module_states": False,
    "reshard_after_forward": None,
    "max_norm": 0.0,
    "norm_type": 2.0,
    "extra_dp_size": None,
    "verbose": False,
    "sync_batch_norm": True,
    "broadcast_buffers": True,
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "extra_dp_size": 2}
ZERO2 = {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "extra_dp_size": 2}
BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.Bilinear, nn.Conv1d})


def arguments(**given):
    return arguments_of(FSDPConfig, DEFAULTS | given)


def checked(world_size=4, **given):
    made = arguments(**given)
    made.check(world_size)
    return made


def old_policy(module, recurse, unwrapped_params):
    return True


def fill(module):
    module.reset_parameters()


def test_defaults_pass():
    made = checked()
    assert made.mesh_shape(4, 1) == (1, 4)
    assert made.default_reshard is None
    assert made.precision_dtypes == PrecisionDtypes()
    assert not made.offloads


# Arguments, and what the message says to write instead. Four ranks.
BAD = [
    ({"sharding_strategy": "full_shard"}, "choose one of FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD"),
    ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "choose one of FULL_SHARD"),
    ({"sharding_strategy": 3}, "choose one of FULL_SHARD"),
    ({"sharding_strategy": ["FULL_SHARD"]}, "choose one of FULL_SHARD"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "leave it out, or choose FULL_SHARD"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": 2}, "leave it out, or choose FULL_SHARD"),
    ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, "leave it out, or choose FULL_SHARD"),
    ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": 0}, "leave it out, or choose FULL_SHARD"),
    ({**ZERO2, "reshard_after_forward": True}, "leave it out, or choose FULL_SHARD"),
    ({"reshard_after_forward": 3}, "does not divide the 4 ranks that share the shards"),
    ({"reshard_after_forward": 8}, "does not divide the 4 ranks that share the shards"),
    ({"reshard_after_forward": 0}, "a divisor of that number above 1"),
    ({"reshard_after_forward": -2}, "a divisor of that number above 1"),
    ({"reshard_after_forward": 2.0}, "a divisor of that number above 1"),
    ({"reshard_after_forward": "True"}, "give True, False"),
    ({"reshard_after_forward": 1}, "write False for that"),
    ({**HYBRID, "reshard_after_forward": 4}, "does not divide the 2 ranks that share the shards"),
    ({"extra_dp_size": 2}, "choose HYBRID_SHARD"),
    ({"extra_dp_size": 1, "sharding_strategy": "NO_SHARD"}, "choose HYBRID_SHARD"),
    ({**HYBRID, "extra_dp_size": 3}, "give a divisor of the world size"),
    ({**HYBRID, "extra_dp_size": 0}, "give a divisor of the world size"),
    ({**HYBRID, "extra_dp_size": True}, "give a divisor of the world size"),
    ({"process_group": "world"}, "give a ProcessGroup, for HYBRID_SHARD a pair of them"),
    ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "none may be left out"),
    ({"process_group": (None, None)}, "choose HYBRID_SHARD"),
    ({"process_group": (None, None), "sharding_strategy": "HYBRID_SHARD"}, "give (shard_group, replicate_group)"),
    ({"process_group": (), "sharding_strategy": "HYBRID_SHARD"}, "give (shard_group, replicate_group)"),
    ({"cpu_offload": "cpu"}, "CPUOffload(offload_params=True)"),
    ({"cpu_offload": 1}, "CPUOffload(offload_params=True)"),
    ({"cpu_offload": CPUOffload(offload_params="yes")}, "pass True or False"),
    ({"mixed_precision": "bf16"}, "Booster(plugin=..., mixed_precision=...)"),
    ({"mixed_precision": BF16MixedPrecision()}, "Booster(plugin=..., mixed_precision=...)"),
    ({"mixed_precision": BF16}, "give MixedPrecisionPolicy or MixedPrecision"),
    ({"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)}, "mixed_precision='fp8'"),
    ({"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.int8)}, "torch.bfloat16"),
    ({"mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.complex64)}, "reduce_dtype=torch.complex64"),
    ({"mixed_precision": MixedPrecisionPolicy(output_dtype="bf16")}, "output_dtype='bf16'"),
    ({"mixed_precision": MixedPrecision(buffer_dtype=torch.int64)}, "buffer_dtype=torch.int64"),
    ({"mixed_precision": MixedPrecisionPolicy(cast_forward_inputs=None)}, "pass True or False"),
    ({"mixed_precision": MixedPrecision(cast_root_forward_inputs=1)}, "pass True or False"),
    ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "leave it out"),
    ({"mixed_precision": MixedPrecision(_module_classes_to_ignore=nn.LayerNorm)}, "a tuple of classes of modules"),
    ({"mixed_precision": MixedPrecision(_module_classes_to_ignore=[FP32])}, "a tuple of classes of modules"),
    ({"auto_wrap_policy": nn.Linear}, "ModuleWrapPolicy({Block})"),
    ({"auto_wrap_policy": {nn.Linear}}, "ModuleWrapPolicy({Block})"),
    ({"auto_wrap_policy": "Block"}, "ModuleWrapPolicy({Block})"),
    ({"auto_wrap_policy": transformer_auto_wrap_policy}, "missing a required argument: 'transformer_layer_cls'"),
    ({"auto_wrap_policy": old_policy}, "nonwrapped_numel"),
    ({"ignored_modules": nn.Linear(1, 1)}, "as in [model.head]"),
    ({"ignored_modules": ["head"]}, "as in [model.head]"),
    ({"ignored_modules": nn.ModuleDict({"head": nn.Linear(1, 1)})}, "as in [model.head]"),
    ({"param_init_fn": "normal"}, "give a function that takes a module"),
    *[({name: value}, f"{name} must be a bool, got {value!r}") for name in (
        "sync_module_states", "verbose", "sync_batch_norm", "broadcast_buffers") for value in (1, None)],
    ({"max_norm": -1.0}, "give a positive number, or 0 for no clipping"),
    ({"max_norm": NAN}, "give a positive number, or 0 for no clipping"),
    ({"norm_type": 0}, "give a positive number, or float('inf')"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "advice"), BAD, ids=[f"{index}-{'-'.join(bad[0])}" for index, bad in enumerate(BAD)])
def test_what_cannot_be_is_refused(given, advice):
    with pytest.raises(ConfigError) as caught:
        arguments(**given).check(4)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        ({}, (1, 4, None)),
        ({"reshard_after_forward": True}, (1, 4, True)),
        ({"reshard_after_forward": False}, (1, 4, False)),
        ({"reshard_after_forward": 2}, (1, 4, 2)),
        ({"reshard_after_forward": 4}, (1, 4, 4)),
        ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, (1, 4, None)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, (1, 4, False)),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "reshard_after_forward": False}, (1, 4, False)),
        ({"sharding_strategy": "NO_SHARD"}, (4, 1, False)),
        (HYBRID, (2, 2, None)),
        ({**HYBRID, "reshard_after_forward": 2}, (2, 2, 2)),
        ({**HYBRID, "extra_dp_size": 1}, (1, 4, None)),
        ({**HYBRID, "extra_dp_size": 4}, (4, 1, None)),
        (ZERO2, (2, 2, False)),
    ],
)
def test_strategies(given, meaning):
    made = checked(4, **given)
    assert (*made.mesh_shape(4, 1), made.default_reshard) == meaning


def test_hybrid_has_one_replica_per_host():
    hybrid = checked(12, sharding_strategy="HYBRID_SHARD")
    assert hybrid.mesh_shape(12, 3) == (3, 4)
    with pytest.raises(ConfigError, match=r"12 ranks do not divide evenly over 5 hosts.*one of 2, 3, 4, 6, 12"):
        hybrid.mesh_shape(12, 5)
    with pytest.raises(ConfigError, match="single host that would be FULL_SHARD: give extra_dp_size="):
        hybrid.mesh_shape(12, 1)


def test_parts_after_forward_divide_a_host():
    """How many ranks share the shards is known only with the hosts."""
    hybrid = checked(12, sharding_strategy="HYBRID_SHARD", reshard_after_forward=6)
    assert hybrid.mesh_shape(12, 2) == (2, 6)
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        hybrid.mesh_shape(12, 3)


@distributed(1)
def test_parts_after_forward_as_fully_shard_takes_them():
    """What is refused here, torch refuses or means something else by."""
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="factor of 1, not 2"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=2)
    for shard_size, value in ((1, 2), (4, 3), (4, 1)):
        with pytest.raises(ConfigError):
            check_reshard_after_forward(value, shard_size)


@pytest.mark.parametrize(
    ("given", "offloads", "pins"),
    [
        (None, False, None),
        (False, False, None),
        (True, True, True),
        (CPUOffload(), False, None),
        (CPUOffload(offload_params=True), True, True),
        (OffloadPolicy(), False, None),
        (CPUOffloadPolicy(), True, True),
        (CPUOffloadPolicy(pin_memory=False), True, False),
    ],
)
def test_offload(given, offloads, pins):
    made = checked(cpu_offload=given)
    assert made.offloads is offloads
    assert type(made.offload_policy(CPU)) is OffloadPolicy  # there is nothing to move
    policy = made.offload_policy(CUDA)
    assert isinstance(policy, CPUOffloadPolicy) is offloads
    if offloads:
        assert policy.pin_memory is pins


def test_first_generation_precision():
    given = MixedPrecision(param_dtype=FP16, buffer_dtype=FP32)
    formats = checked(mixed_precision=given).precision_dtypes
    assert formats == PrecisionDtypes(
        param_dtype=FP16,
        reduce_dtype=FP16,
        buffer_dtype=FP32,
        casts_root_inputs=True,
        casts_module_inputs=False,
        own_dtype_classes=(_BatchNorm,),
    )
    assert formats.fsdp2_policy(is_root=True) == MixedPrecisionPolicy(FP16, FP16, None, True)
    assert formats.fsdp2_policy(is_root=False) == MixedPrecisionPolicy(FP16, FP16, None, False)
    inputs = {"cast_forward_inputs": True, "cast_root_forward_inputs": False, "_module_classes_to_ignore": []}
    formats = checked(mixed_precision=MixedPrecision(reduce_dtype=FP32, **inputs)).precision_dtypes
    assert formats == PrecisionDtypes(reduce_dtype=FP32, casts_root_inputs=False, casts_module_inputs=True)


def test_second_generation_precision():
    formats = checked(mixed_precision=MixedPrecisionPolicy(BF16, FP32, FP32, False)).precision_dtypes
    assert formats == PrecisionDtypes(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32, casts_root_inputs=False, casts_module_inputs=False
    )
    assert formats.fsdp2_policy(is_root=True) == MixedPrecisionPolicy(BF16, FP32, FP32, False)
    assert formats.fsdp2_policy(is_root=False) == MixedPrecisionPolicy(BF16, FP32, None, False)
    assert checked(mixed_precision=MixedPrecisionPolicy()).precision_dtypes == PrecisionDtypes()


def test_modules_of_a_generator_are_looked_at_more_than_once():
    layers = [nn.Linear(1, 1), nn.Tanh()]
    made = checked(ignored_modules=iter(layers))
    made.check(4)
    assert list(made.ignored_modules) == layers


@pytest.mark.parametrize(
    "policy",
    [
        always_wrap_policy,
        size_based_auto_wrap_policy,
        BLOCKS,
        ModuleWrapPolicy({nn.Linear}),
        CustomPolicy(lambda module: False),
        lambda module, recurse, nonwrapped_numel: True,
        lambda module, recurse, **_: True,
    ],
)
def test_policies_are_taken(policy):
    assert checked(auto_wrap_policy=policy).auto_wrap_policy is policy


def test_facts_say_the_same_of_the_same():
    pairs = [
        ({"sharding_strategy": "FULL_SHARD"}, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
        ({"cpu_offload": True}, {"cpu_offload": CPUOffload(offload_params=True)}),
        ({"verbose": True}, {}),
        ({"ignored_modules": []}, {}),
        ({"ignored_modules": [nn.Linear(1, 1)]}, {"ignored_modules": [nn.Linear(2, 2)]}),
    ]
    for one, other in pairs:
        assert checked(**one).fingerprint == checked(**other).fingerprint


def test_facts_tell_what_differs_apart():
    different = [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"mixed_precision": MixedPrecisionPolicy()},
        {"mixed_precision": MixedPrecisionPolicy(BF16)},
        {"mixed_precision": MixedPrecisionPolicy(BF16, FP32)},
        {"mixed_precision": MixedPrecision(BF16)},
        {"mixed_precision": MixedPrecision(BF16, _module_classes_to_ignore=(nn.LayerNorm,))},
        {"auto_wrap_policy": always_wrap_policy},
        {"auto_wrap_policy": BLOCKS},
        {"auto_wrap_policy": functools.partial(BLOCKS.func, transformer_layer_cls={nn.Linear})},
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=3)},
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=4)},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Conv1d})},
        {"ignored_modules": [nn.Linear(1, 1)]},
        {"param_init_fn": fill},
        {"sync_module_states": True},
        {"max_norm": 1.0},
        {"norm_type": 1.0},
        {"sync_batch_norm": False},
        {"broadcast_buffers": False},
        {"sharding_strategy": "HYBRID_SHARD"},
        HYBRID,
    ]
    facts = [checked(**given).fingerprint for given in different]
    for (one, facts_of_one), (other, facts_of_other) in itertools.combinations(zip(different, facts, strict=True), 2):
        assert facts_of_one != facts_of_other, f"{one} and {other}"


PRINTS_FACTS = """
from unit.test_torch_fsdp_settings import *
policies = [BLOCKS, ModuleWrapPolicy({nn.Linear, nn.Conv1d, nn.Bilinear}), CustomPolicy(lambda module: True)]
policies.append(functools.partial(always_wrap_policy, names=set('abcdefgh')))
for policy in policies:
    made = arguments(auto_wrap_policy=policy, mixed_precision=MixedPrecision(FP16), ignored_modules=[nn.Tanh()],
                     param_init_fn=fill)
    print(*made.fingerprint, sep=chr(10))
"""


@pytest.mark.slow
def test_facts_are_the_same_in_every_process():
    """Sets have another order and functions other addresses in each."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([tests, os.path.join(tests, "cases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = [
        subprocess.run(
            [sys.executable, "-c", PRINTS_FACTS],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert said[0] == said[1]
    assert "Bilinear" in said[0]
    assert " at 0x" not in said[0]


def sums_along(mesh):
    """Returns the ranks that this rank adds up with along each axis, as bits."""
    assert mesh.mesh_dim_names == ("replica", "shard")
    return [_sum_of_bits(mesh.get_group(axis)) for axis in mesh.mesh_dim_names] + [
        _sum_of_bits(mesh["shard"].get_group())
    ]


def _sum_of_bits(group):
    bit = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(bit, group=group)
    return int(bit)


def axes_of(given):
    """Returns the mesh that this rank gets, and which ranks it talks to along each axis."""
    world_size = dist.get_world_size()
    made = checked(world_size, **given)
    shape = made.mesh_shape(world_size, 1)
    mesh = make_mesh(made.process_group, "cpu", shape)
    assert tuple(mesh.shape) == shape
    wrapped = fully_shard(nn.Linear(3, 5), mesh=mesh["shard"])
    assert torch.isfinite(wrapped(torch.ones(2, 3))).all()
    return mesh.mesh.tolist(), sums_along(mesh)


def bits(rows):
    """Returns for every rank the expected sums along replica and shard, given the mesh's rows."""
    columns = list(zip(*rows, strict=True))
    return [
        [sum(1 << one for one in next(line for line in lines if rank in line)) for lines in (columns, rows)]
        for rank in range(sum(map(len, rows)))
    ]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, [[0, 1, 2, 3]]),
        ({"sharding_strategy": "NO_SHARD"}, [[0], [1], [2], [3]]),
        (HYBRID, [[0, 1], [2, 3]]),
        ({**HYBRID, "extra_dp_size": 4}, [[0], [1], [2], [3]]),
    ],
)
def test_meshes(given, rows):
    meshes = run_ranks(axes_of, 4, given)
    for rank, (mesh, sums) in enumerate(meshes):
        assert mesh == rows
        assert sums == [*bits(rows)[rank], bits(rows)[rank][1]]


def make_groups(kind):
    """Returns a process_group of four ranks."""
    if kind == "world":
        return dist.group.WORLD
    if kind == "all":
        return dist.new_group()
    if kind == "line":
        return DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("data",))
    if kind == "mesh":
        return init_device_mesh("cpu", (2, 2))
    if kind == "named columns":
        return DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("across", "along"))
    if kind == "slice":
        return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("r", "s", "t"))["r", "s"]
    rows, columns = {
        "rows": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        "columns": ([[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        "crossed": ([[0, 1], [2, 3]], [[0, 3], [1, 2]]),
    }[kind]
    shard_group, _ = dist.new_subgroups_by_enumeration(rows)
    replica_group, _ = dist.new_subgroups_by_enumeration(columns)
    return shard_group, replica_group


def axes_of_groups(kind, strategy):
    group = make_groups(kind)
    mesh, sums = axes_of({"process_group": group, "sharding_strategy": strategy})
    return mesh, sums, arguments(process_group=group, sharding_strategy=strategy).fingerprint


@pytest.mark.parametrize(
    ("kind", "strategy", "rows"),
    [
        ("world", "FULL_SHARD", [[0, 1, 2, 3]]),
        ("all", "SHARD_GRAD_OP", [[0, 1, 2, 3]]),
        ("all", "NO_SHARD", [[0], [1], [2], [3]]),
        ("line", "FULL_SHARD", [[0, 1, 2, 3]]),
        ("line", "NO_SHARD", [[0], [1], [2], [3]]),
        ("mesh", "HYBRID_SHARD", [[0, 1], [2, 3]]),
        ("slice", "HYBRID_SHARD", [[0, 1], [2, 3]]),
        ("named columns", "HYBRID_SHARD", [[0, 2], [1, 3]]),
        ("rows", "HYBRID_SHARD", [[0, 1], [2, 3]]),
        ("columns", ShardingStrategy._HYBRID_SHARD_ZERO2, [[0, 2], [1, 3]]),
    ],
)
def test_meshes_of_the_users_groups(kind, strategy, rows):
    results = run_ranks(axes_of_groups, 4, kind, strategy)
    for rank, (mesh, sums, facts) in enumerate(results):
        assert mesh == rows
        assert sums == [*bits(rows)[rank], bits(rows)[rank][1]]
        assert facts == results[0][2]


@distributed(4)
def test_groups_of_one_rank_more_or_less():
    """No communication: what one rank sees of its own groups."""
    rank = dist.get_rank()
    half = [0, 1] if rank < 2 else [2, 3]
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1], [2], [3]])
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    cases = [
        ({"process_group": pair}, f"has ranks {half} of 4"),
        ({"process_group": pair, **hybrid}, f"has ranks {half} of 4"),
        ({"process_group": dist.new_group([0, 1])}, "none may be left out"),
        ({"process_group": dist.new_group(), **hybrid}, "give (shard_group, replicate_group)"),
        ({"process_group": (pair, pair), **hybrid}, "must have this rank alone in common"),
        ({"process_group": (pair, alone), **hybrid}, "their sizes make 4"),
        ({"process_group": (pair, alone)}, "choose HYBRID_SHARD"),
        ({"process_group": init_device_mesh("cpu", (4,)), **hybrid}, "takes a mesh of two"),
        ({"process_group": init_device_mesh("cpu", (2, 2))}, "one of one dimension"),
        ({"process_group": init_device_mesh("cpu", (2, 2)), **HYBRID}, "give one of the two"),
        ({"process_group": make_groups("rows"), **HYBRID}, "give one of the two"),
        ({"process_group": DeviceMesh("cpu", [0, 2, 1, 3])}, "ascends along each dimension"),
        ({"process_group": DeviceMesh("cpu", [[0, 1], [3, 2]]), **hybrid}, "ascends along each dimension"),
        ({"process_group": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]}, f"has ranks {half} of 4"),
        ({"process_group": init_device_mesh("meta", (4,))}, "make it for 'cpu'"),
    ]
    for given, advice in cases:
        with pytest.raises(ConfigError) as caught:
            arguments(**given).check(4)
        assert advice in str(caught.value), advice
    checked(process_group=dist.group.WORLD, **HYBRID)  # which says nothing about replicas


@distributed(4)
def test_groups_that_are_no_grid_are_refused_on_all_ranks():
    made = checked(process_group=make_groups("crossed"), sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ConfigError, match="rows and the columns of a grid"):
        make_mesh(made.process_group, "cpu", made.mesh_shape(4, 1))
