"""One package communicates: others use torch.distributed for queries and to create and destroy groups."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType

import pytest
import torch.distributed as dist
from import_graph import MODULES, ROOT

COMM = ROOT / "booster" / "comm"
# A receive that times out at once closes a connection of gloo, and receives nothing.
ALLOWED = {ROOT / "booster" / "fault_tolerance" / "collective_errors.py": ["irecv"]}
FILES = [path for path in MODULES.values() if COMM not in path.parents]

# Functions of torch.distributed that move something between ranks, by their beginnings: new ones are caught, too.
COMMUNICATING = (
    *("all_gather", "all_reduce", "all_to_all", "allgather", "barrier", "batch_isend", "broadcast", "gather", "irecv"),
    *("isend", "monitored_barrier", "recv", "reduce", "scatter", "send"),
)
TORCH_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.nn")


def _is_communicating(name):
    # Not ReduceOp and the like: those are classes.
    return name.startswith(COMMUNICATING)


def _violations(source):
    """Returns the communicating names that a module takes from torch.distributed, however it imports them."""
    tree = ast.parse(source)
    aliases, found = {"torch.distributed"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name.startswith(TORCH_MODULES)}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(TORCH_MODULES):
            found += [alias.name for alias in node.names if _is_communicating(alias.name)]
            found += [alias.name for alias in node.names if alias.name.startswith("_functional_collectives")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and _is_communicating(node.attr):
            found.append(node.attr)
    return found


def test_only_comm_communicates():
    for path in FILES:
        found = _violations(path.read_text())
        assert found == ALLOWED.get(path, []), (
            f"{path} calls {found} itself: booster.comm counts, names missing ranks and injects faults"
        )


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast_object_list([])",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import isend",
        "from torch.distributed.nn import all_reduce",
        "import torch.distributed as dist\ncall = dist.reduce_scatter_tensor",
        "from torch.distributed import _functional_collectives as funcol",
    ],
)
def test_the_search_finds_what_communicates(source):
    assert _violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.init_process_group()\ndist.get_rank()\ndist.destroy_process_group()",
        "from booster.comm import broadcast\nbroadcast([])",
        "queue.send(x)",
    ],
)
def test_the_search_leaves_the_rest(source):
    assert not _violations(source)


def test_every_communicating_function_of_this_torch_is_known():
    """A function of torch with a group and a tensor that the list above misses is a gap in the search."""
    unknown = []
    for name in vars(dist):
        thing = vars(dist)[name]
        if name.startswith("_") or type(thing) is not FunctionType or _is_communicating(name):
            continue
        names = set(inspect.signature(thing).parameters)
        if "group" in names and names & {"tensor", "tensor_list", "input", "output", "obj", "object_list"}:
            unknown.append(name)
    assert not unknown
