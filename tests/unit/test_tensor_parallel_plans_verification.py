"""A user's plan is proven: modules that compute something else in parts are refused, with what to write instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tp_plan.plan import STYLES, Style
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan


class Attention(nn.Module):
    """Right in parts, if its projection is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.head_dim = 4, 8
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], -1, self.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one.reshape(self.shape(x)).transpose(1, 2) for one in self.c_attn(x).chunk(3, dim=-1)]
        return self.c_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class WholeHeadSize(Attention):
    """Heads become wider as their number falls, without an error."""

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], -1, x.shape[2] // self.n_head)


class WholeWidth(Attention):
    """As nanoGPT's."""

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], self.n_head, x.shape[2] // self.n_head)


class SplitByWidth(Attention):
    """As nanoGPT's, once its heads are counted by -1."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd = 32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [one.view(self.shape(x)).transpose(1, 2) for one in self.c_attn(x).split(self.n_embd, dim=2)]
        return self.c_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Asking(Pair):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x + other)


class Noisy(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.up(x), 0.5))


class Single(Pair):
    """Computes in single precision whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).float().softmax(dim=1).to(x.dtype))


class Caching(Pair):
    """Keeps a tensor of the first call, of this rank's size."""

    cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.cache = torch.ones_like(hidden) if self.cache is None else self.cache
        return self.down(hidden + self.cache)


class Twice(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Outer(nn.Module):
    """The layers that belong together are in two modules."""

    def __init__(self, *, shifts: bool = False) -> None:
        super().__init__()
        self.num_heads, self.shifts = 4, shifts
        self.inner, self.output = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return self.output(hidden + hidden.roll(1, dims=-1) if self.shifts else hidden)


ATTENTION = {"*.c_attn": "packed_colwise:3", "*.c_proj": "rowwise"}
PAIR = {"*.up": "colwise", "*.down": "rowwise"}


def layers(kind: type[nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(2))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Attention, ATTENTION),
        (SplitByWidth, ATTENTION),
        (Pair, PAIR),
        (Single, PAIR),
        (Caching, PAIR),
        (Twice, PAIR),
        (Outer, {"*.inner.0": "colwise", "*.output.0": "rowwise"}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_right_plans_are_accepted_without_a_note(kind: type[nn.Module], plan: dict[str, str], device: str) -> None:
    with torch.device(device):
        model = layers(kind)
    for tp_size in (2, 4):
        chosen = choose_plan(model, tp_size=tp_size, plan=plan)
        assert chosen.notes == ()
        assert len(chosen.entries) == 4


def test_plain_colwise_on_a_fused_projection() -> None:
    with pytest.raises(ConfigError, match=r"shards '0' \(Attention\).*\(1\) if 'c_attn' .* 'packed_colwise:3'"):
        choose_plan(layers(Attention), tp_size=2, plan={**ATTENTION, "*.c_attn": "colwise"})


def test_sizes_of_the_whole_without_an_error() -> None:
    said = r"'0' \(WholeHeadSize\).*'c_proj' \(rowwise\) does not get its rank's .* such as C // self.n_head.*head_dim"
    with pytest.raises(ConfigError, match=said):
        choose_plan(layers(WholeHeadSize), tp_size=2, plan=ATTENTION)


def test_sizes_of_the_whole_with_an_error() -> None:
    said = r"'0' \(WholeWidth\).*raises RuntimeError: shape .* is invalid.* such as C // self.n_head.*head_dim"
    with pytest.raises(ConfigError, match=said):
        choose_plan(layers(WholeWidth), tp_size=2, plan=ATTENTION)


def test_colwise_and_rowwise_swapped() -> None:
    swapped = {"*.up": "rowwise", "*.down": "colwise"}
    said = r"'up' \(rowwise\) gets all 32 features, .*\(1\) if 'colwise' and 'rowwise' are swapped, exchange them"
    with pytest.raises(ConfigError, match=said):
        choose_plan(layers(Pair), tp_size=2, plan=swapped)


def test_layers_in_modules_of_their_own() -> None:
    model = nn.ModuleList([Outer(shifts=True)])
    with pytest.raises(ConfigError, match=r"'0' \(Outer\).*'output\.0' \(rowwise\) does not get"):
        choose_plan(model, tp_size=2, plan={"0.inner.0": "colwise", "0.output.0": "rowwise"})


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Asking, "its forward has the further argument 'other', whose value is unknown"), (Noisy, "its output is random")],
)
def test_what_cannot_be_proven_is_accepted_with_a_note(kind: type[nn.Module], why: str) -> None:
    (note,) = choose_plan(layers(kind), tp_size=2, plan=PAIR).notes
    assert note.startswith(f"* is sharded by the plan without verification: {why}")


def test_whole_models_are_not_run() -> None:
    model = nn.ModuleDict({"layers": layers(Pair), "up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
    (note,) = choose_plan(model, tp_size=2, plan={"up": "colwise", "down": "rowwise"}).notes
    assert note == (
        "ModuleDict is sharded by the plan without verification: it contains full layers of a stack, which are not run"
    )


def test_bare_parameters_are_not_proven() -> None:
    model = Pair()
    model.scale = nn.Parameter(torch.ones(4, 32))
    (note,) = choose_plan(model, tp_size=2, plan={"up": "colwise", "down": "rowwise", "scale": "rowwise"}).notes
    assert note.endswith("without verification: 'rowwise' of scale needs communication with other ranks")


def test_the_model_and_random_numbers_stay_as_they_are() -> None:
    model = layers(Attention).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_plan(model, tp_size=2, plan=ATTENTION)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(one.n_head == 4 and one.training and one.c_attn.out_features == 96 for one in model)
    assert all("forward" not in vars(one.c_proj) and not one.c_proj._forward_hooks for one in model)


def test_a_derived_plan_says_what_to_change_in_the_forward() -> None:
    plan = choose_plan(nn.ModuleDict({"good": Pair(), "bad": WholeWidth()}), tp_size=2)
    (note,) = (note for note in plan.notes if note.startswith("bad.c_attn is not sharded: "))
    assert "it raises when it is run in shards" in note
    assert "C // self.n_head" in note
    assert "self.head_dim" in note


@pytest.mark.parametrize("pattern", ["*.up.weight", "*.up.bias", "*.up.*"])
def test_weights_of_layers_are_no_entries(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"of a Linear, but styles apply to layers.* name the module, '\*\.up'"):
        choose_plan(layers(Pair), tp_size=2, plan={pattern: "colwise", "*.down": "rowwise"})
    with pytest.raises(ConfigError, match="the weight of a Embedding"):
        choose_plan(nn.ModuleDict({"table": nn.Embedding(8, 8)}), tp_size=2, plan={"table.weight": "colwise"})


def test_patterns_are_checked_without_tensor_parallelism() -> None:
    with pytest.raises(ConfigError, match=r"'\*\.upp', which matches no module"):
        choose_plan(layers(Pair), tp_size=1, plan={"*.upp": "colwise"})
    plan = choose_plan(layers(Pair), tp_size=1, plan=PAIR)
    assert (plan.entries, plan.stacks) == ((), (("0", "1"),))


def test_the_styles_are_in_the_help() -> None:
    assert all(f'"{name}"' in str(Style.__doc__) for name in STYLES)


# Linear layers with a forward of their own, behind a column-parallel one.


class Halved(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 0.5


class Standardized(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean(dim=1, keepdim=True)
        return F.linear(input, weight / weight.std(dim=1, keepdim=True), self.bias)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight * 4 / self.in_features**0.5, self.bias)


class Adapted(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input @ self.a.t() @ self.b.t()


class Doubled(nn.Linear):
    """The same in shards."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(2 * input, self.weight, self.bias)


class TrainedOtherwise(Pair):
    """Mixes the features of all ranks in training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(hidden - hidden.mean(dim=-1, keepdim=True) if self.training else hidden)


def _with_row(kind: type[nn.Linear]) -> nn.Module:
    pair = Pair()
    pair.down = kind(32, 32)
    return pair


@pytest.mark.parametrize("kind", [Halved, Standardized, Scaled, Adapted])
def test_rows_with_a_forward_of_their_own_are_left_whole_or_refused(kind):
    model = nn.ModuleList([_with_row(kind), Pair()])
    plan = choose_plan(model, tp_size=2)
    assert {entry.name for entry in plan.entries} == {"1.up", "1.down"}
    if kind is not Adapted:
        with pytest.raises(ConfigError, match=r"'down' \(rowwise\) has a forward of its own, of which shards do not"):
            choose_plan(model, tp_size=2, plan=PAIR)


def test_rows_with_a_forward_of_their_own_that_adds_up_are_sharded():
    plan = choose_plan(nn.ModuleList([_with_row(Doubled)]), tp_size=2)
    assert {entry.name for entry in plan.entries} == {"0.up", "0.down"}


def test_what_is_computed_in_training_only_is_verified():
    plan = choose_plan(nn.ModuleList([TrainedOtherwise(), Pair()]), tp_size=2)
    assert {entry.name for entry in plan.entries} == {"1.up", "1.down"}


class Activated(Pair):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class SharesItsActivation(nn.Module):
    """The activation of the layers is also that of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()
        self.layers = nn.ModuleList(Activated(self.act) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_parameter_of_sharded_features_that_is_used_on_all_of_them_is_an_error():
    with pytest.raises(ConfigError, match=r"'layers.0.act.weight'.*is also 'act.weight', which is used on all"):
        choose_plan(SharesItsActivation(), tp_size=2)
    shared = nn.PReLU()
    choose_plan(nn.ModuleList(Activated(shared) for _ in range(2)), tp_size=2)


def test_a_plan_changes_no_state_of_the_model():
    model = nn.ModuleList(Pair() for _ in range(2))
    nn.utils.parametrizations.spectral_norm(model[0].up)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    choose_plan(model, tp_size=2)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
