"""CPUAdam, FusedAdam and HybridAdam in one process: torch's arithmetic, torch's states, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from booster import Booster, ConfigError
from booster.interface import FusedUpdate, StateAllocator
from booster.optim import CPUAdam, FusedAdam, HybridAdam
from booster.optim.adam_update import (
    AdamGroupUpdate,
    AdamParamUpdate,
    Hyperparameters,
    StepArguments,
    flat_view,
    is_dense,
    match_strides,
    update_on_device,
    update_on_host,
    view_like,
)
from booster.optim.base import init_moments
from booster.plugins.sharding.elementwise import find_obstacle, require_elementwise

CLASSES = [CPUAdam, FusedAdam, HybridAdam]
SHAPES = [(33, 17), (7,), (), (0, 3), (5, 2, 3), (1,)]
# A few units of 2**-24 in one step of length lr, grown over the steps: the kernel and torch divide in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(*lists, step=0, dtype=None):
    """Gives all lists of parameters the same gradients."""
    generator = torch.Generator().manual_seed(1000 + step)
    for members in zip(*lists, strict=True):
        gradient = torch.randn(members[0].shape, generator=generator)
        for parameter in members:
            parameter.grad = gradient.to(parameter.dtype if dtype is None else dtype).clone()


def train(optimizer, params, steps=range(4)):
    for step in steps:
        give_gradients(params, step=step)
        optimizer.step()


def assert_same(found, expected, **allowed):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(allowed or CLOSE))


def assert_equal_state(one, other):
    """Bit for bit, parameter by parameter."""
    for p, q in zip(params_of(one), params_of(other), strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            assert torch.equal(value, other.state[q][key]), key


def params_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Arithmetic.


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(cls, adamw_mode, weight_decay):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    optimizer = cls(ours, adamw_mode=adamw_mode, **settings)
    reference = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)(theirs, **settings)
    for step in range(10):
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        for key, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[one][key], value, **CLOSE)


@pytest.mark.parametrize("maximize", [False, True])
def test_each_group_has_its_own_hyperparameters(maximize):
    ours, theirs = parameters(), parameters()

    def groups(params):
        return [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.3},
            {"params": params[2:4], "betas": (0.5, 0.6), "maximize": maximize, "weight_decay": 0.1},
            {"params": params[4:], "eps": 0.1, "decoupled_weight_decay": False, "weight_decay": 0.2},
        ]

    optimizer = HybridAdam(groups(ours))
    reference = torch.optim.Adam(groups(theirs), decoupled_weight_decay=True)
    for step in range(4):
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_without_bias_correction_the_first_step_is_plain():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = CPUAdam([parameter], lr=0.1, bias_correction=False, betas=(0.9, 0.99), eps=1e-8)
    gradient = torch.tensor([0.5, -3.0])
    parameter.grad = gradient.clone()
    optimizer.step()
    first, second = 0.1 * gradient, 0.01 * gradient**2
    torch.testing.assert_close(
        parameter.detach(), torch.tensor([1.0, -2.0]) - 0.1 * first / (second.sqrt() + 1e-8), **CLOSE
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_formats_have_states_of_enough_digits(dtype):
    ours, exact = parameters(dtype=dtype), parameters(dtype=dtype)
    exact = [nn.Parameter(one.detach().double()) for one in exact]
    optimizer, reference = CPUAdam(ours, lr=0.01), torch.optim.Adam(exact, lr=0.01)
    give_gradients(ours, dtype=dtype)
    for one, other in zip(ours, exact, strict=True):
        other.grad = one.grad.double()
    optimizer.step()
    reference.step()
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    for one, other in zip(ours, exact, strict=True):
        assert optimizer.state[one]["exp_avg"].dtype is expected
        torch.testing.assert_close(optimizer.state[one]["exp_avg_sq"].double(), reference.state[other]["exp_avg_sq"])
        torch.testing.assert_close(one.detach(), other.detach().to(dtype))


def test_parameters_without_a_gradient_are_left_alone():
    params = parameters()
    optimizer = CPUAdam(params)
    give_gradients(params)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
    assert float(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("memory_format", ["channels_last", "transposed", "strided", "gradient"])
def test_memory_in_any_order(memory_format):
    def make():
        values = torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(0))
        if memory_format == "channels_last":
            return nn.Parameter(values.to(memory_format=torch.channels_last))
        if memory_format == "transposed":
            return nn.Parameter(values.permute(2, 0, 3, 1))
        return nn.Parameter(values[::2, :, :, 1:4] if memory_format == "strided" else values)

    ours, theirs = make(), make()
    optimizer, reference = CPUAdam([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01, weight_decay=0)
    for step in range(3):
        gradient = torch.randn(ours.shape, generator=torch.Generator().manual_seed(step))
        if memory_format == "gradient":
            gradient = gradient.to(memory_format=torch.channels_last)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"], **CLOSE)


def test_tensors_keep_their_values_in_another_memory_order():
    values = torch.arange(120.0).view(2, 3, 4, 5)
    model = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert is_dense(model)
    assert is_dense(values.permute(3, 1, 0, 2))
    assert not is_dense(values[:, ::2])
    assert not is_dense(torch.zeros(3, 1).expand(3, 4))
    ordered = match_strides(values, model)
    assert ordered.stride() == model.stride()
    assert torch.equal(ordered, values)
    assert torch.equal(view_like(flat_view(ordered).clone(), model), values)
    assert match_strides(values, torch.empty_like(values)) is values


# What torch's optimizers do.


def test_learning_rates_may_be_tensors_and_scheduled():
    ours, theirs = parameters(), parameters()
    optimizer = HybridAdam(ours, lr=torch.tensor(0.1))
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=5) for one in (optimizer, reference)]
    for step in range(5):
        give_gradients(ours, theirs, step=step)
        for one, scheduler in zip((optimizer, reference), schedulers, strict=True):
            one.step()
            scheduler.step()
    assert_same(ours, theirs)


def test_a_scheduler_knows_fused_steps():
    params = parameters()
    optimizer = HybridAdam(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    give_gradients(params)
    optimizer.fused_step()
    scheduler.step()  # warns where it saw no step
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_closures_and_hooks():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([parameter], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step(closure).item() < 3.0
    optimizer.fused_step(grad_scale=0.5)
    assert seen == ["before", "after"] * 3


def test_autograd_notices_the_update():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([parameter])
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("overflows", [False, True])
def test_gradient_scaler(overflows):
    ours, theirs = parameters(), parameters()
    optimizer, reference = CPUAdam(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    give_gradients(ours, theirs)
    scaler.scale(torch.ones(1))  # makes the scale
    for parameter in ours:
        parameter.grad *= 2.0**10
    if overflows:
        ours[0].grad[0, 0] = torch.inf
    else:
        reference.step()
    scaler.step(optimizer)
    scaler.update()
    assert_same(ours, theirs)
    assert scaler.get_scale() == (2.0**9 if overflows else 2.0**10)


def test_groups_that_are_added_later():
    ours, theirs = parameters(), parameters()
    optimizer, reference = CPUAdam(ours[:2], lr=0.1), torch.optim.Adam(theirs[:2], lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": ours[2:], "lr": 0.2})
            reference.add_param_group({"params": theirs[2:], "lr": 0.2})
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


# States.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_go_to_torch_and_back(dtype):
    params, others, back = (parameters(dtype=dtype) for _ in range(3))
    optimizer = HybridAdam(params, lr=0.1, weight_decay=0.2)
    train(optimizer, params)
    theirs = torch.optim.AdamW(others)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 0.1
    assert theirs.param_groups[0]["weight_decay"] == 0.2
    if dtype is torch.float32:
        assert_equal_state(optimizer, theirs)
    train(theirs, others)  # it takes the state
    returned = HybridAdam(back)
    returned.load_state_dict(theirs.state_dict())
    for one, other in zip(back, others, strict=True):
        assert returned.state[one]["exp_avg"].dtype is torch.float32
        assert torch.equal(returned.state[one]["exp_avg"], theirs.state[other]["exp_avg"].float())
        assert float(returned.state[one]["step"]) == 8
    train(returned, back)


def test_loading_rounds_no_state():
    params, others = (parameters(dtype=torch.bfloat16) for _ in range(2))
    optimizer, loaded = CPUAdam(params), CPUAdam(others)
    train(optimizer, params)
    loaded.load_state_dict(optimizer.state_dict())
    assert_equal_state(loaded, optimizer)
    exact = optimizer.state[params[0]]["exp_avg"]
    assert not torch.equal(exact, exact.bfloat16().float())  # rounding would have shown


def test_hooks_of_loading_see_tensors():
    params = parameters()
    optimizer = CPUAdam(params)
    train(optimizer, params)
    state = optimizer.state_dict()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append(type(given["state"][0]["exp_avg"])))
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(state)
    assert seen == [torch.Tensor] * 2


def test_hyperparameters_that_an_older_state_lacks_stay():
    params = parameters()
    optimizer = CPUAdam(params, bias_correction=False, adamw_mode=False)
    train(optimizer, params, range(1))
    state = optimizer.state_dict()
    for key in ("bias_correction", "decoupled_weight_decay", "maximize", "amsgrad"):
        del state["param_groups"][0][key]
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["bias_correction"], group["decoupled_weight_decay"], group["maximize"]) == (False, False, False)


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_go_on_alike(cls):
    params = parameters()
    optimizer = cls(params, lr=0.01)
    train(optimizer, params)
    twin = copy.deepcopy(optimizer)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is cls
    for one in (optimizer, twin, loaded):
        train(one, params_of(one), range(4, 6))
    assert_same(params_of(twin), params, rtol=0, atol=0)
    assert_same(params_of(loaded), params, rtol=0, atol=0)
    assert_equal_state(twin, optimizer)


def test_states_that_a_user_puts_there_are_brought_into_form():
    params = parameters()
    optimizer = CPUAdam(params, lr=0.01)
    first = params[0]
    optimizer.state[first] = {"step": 3, "exp_avg": torch.ones(33, 17).double(), "exp_avg_sq": torch.ones(17, 33).t()}
    give_gradients(params)
    optimizer.step()
    state = optimizer.state[first]
    assert float(state["step"]) == 4
    assert state["exp_avg"].dtype is torch.float32
    torch.testing.assert_close(state["exp_avg"], torch.ones(33, 17).lerp(first.grad, 0.1))


# Fused steps.


def test_a_fused_step_is_the_steps_one_by_one():
    ours, theirs = parameters(), parameters()
    optimizer, reference = HybridAdam(ours, lr=0.01), HybridAdam(theirs, lr=0.01)
    weights = [torch.zeros(one.shape, dtype=torch.bfloat16) for one in ours]
    for step in range(3):
        give_gradients(ours, step=step)
        coefficient = torch.tensor(0.3)
        low = {one: one.grad.bfloat16() * 64 for one in ours}
        for one, other in zip(ours, theirs, strict=True):
            other.grad = low[one].float() * (coefficient / 64)
            one.grad = None
        optimizer.fused_step(
            grad_scale=1 / 64,
            clip_coef=coefficient,
            gradients=low,
            model_params=dict(zip(ours, weights, strict=True)),
            zero_grads=True,
        )
        reference.step()
    assert_same(ours, theirs)
    for one, weight in zip(ours, weights, strict=True):
        assert torch.equal(weight, one.bfloat16())
        assert not low[one].any()


def test_the_protocols_are_met():
    for cls in CLASSES:
        optimizer = cls(parameters())
        assert isinstance(optimizer, FusedUpdate)
        assert isinstance(optimizer, StateAllocator)
    assert not isinstance(torch.optim.AdamW(parameters()), FusedUpdate)


@pytest.mark.parametrize("cls", CLASSES)
def test_parts_of_parameters_are_updated_as_wholes(cls):
    optimizer = cls(parameters(), weight_decay=0.1)
    require_elementwise(optimizer)
    assert find_obstacle(optimizer) is None  # the trial that other classes go through


# What accelerators run, on tensors that torch's kernels take as well.


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("zero_grads", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_update_of_devices_is_that_of_the_host(bias_correction, decoupled, zero_grads, dtype):
    def run(update, params):
        group = {**CPUAdam(params).defaults, "lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
        states = [{"step": torch.tensor(float(one.numel() % 3))} for one in params]  # several numbers of steps
        weights = [torch.zeros(one.shape, dtype=torch.bfloat16) for one in params]
        for step in range(3):
            give_gradients(params, step=step)
            updates = []
            for one, state, weight in zip(params, states, weights, strict=True):
                init_moments(state, one)
                gradient = (one.grad * 8).to(dtype)
                updates.append(
                    AdamParamUpdate(
                        one.detach(), gradient, weight, state, state["step"], state["exp_avg"], state["exp_avg_sq"]
                    )
                )
            hyperparameters = Hyperparameters.from_group({**group, "bias_correction": bias_correction})
            arguments = StepArguments(0.25, torch.tensor(0.5), zero_grads)
            update(AdamGroupUpdate(hyperparameters, updates), arguments)
            for one, used in zip(params, updates, strict=True):
                left = torch.zeros_like(one) if zero_grads else one.grad * 8
                assert torch.equal(used.gradient, left.to(dtype))
        return params, weights, states

    ours, theirs = run(update_on_device, parameters()), run(update_on_host, parameters())
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1], rtol=2**-7, atol=1e-6)
    for one, other in zip(ours[2], theirs[2], strict=True):
        assert one["step"] == other["step"]
        torch.testing.assert_close(one["exp_avg_sq"], other["exp_avg_sq"], **CLOSE)


def test_the_update_of_devices_is_seen_by_autograd():
    parameter = nn.Parameter(torch.ones(3))
    loss = parameter.square().sum()
    state = {"step": torch.tensor(0.0)}
    init_moments(state, parameter)
    update = AdamParamUpdate(
        parameter, torch.ones(3), None, state, state["step"], state["exp_avg"], state["exp_avg_sq"]
    )
    with torch.no_grad():
        update_on_device(
            AdamGroupUpdate(Hyperparameters.from_group(CPUAdam([parameter]).defaults), [update]), StepArguments()
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Checkpoints in one process.


@pytest.mark.parametrize("bias_correction", [True, False])
def test_checkpoints_go_to_torch_and_back(tmp_path, bias_correction):
    def boosted(cls, **settings):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        booster = Booster(device="cpu")
        model, optimizer, *_ = booster.boost(model, cls(model.parameters(), lr=0.02, **settings))
        return booster, model, optimizer

    booster, _, optimizer = boosted(HybridAdam, bias_correction=bias_correction)
    train(optimizer.unwrap(), params_of(optimizer))
    booster.save_optimizer(optimizer, tmp_path / "ours.safetensors")
    others, _, theirs = boosted(torch.optim.AdamW)
    if not bias_correction:
        with pytest.raises(Exception, match="always corrects"):
            others.load_optimizer(theirs, tmp_path / "ours.safetensors")
        return
    others.load_optimizer(theirs, tmp_path / "ours.safetensors")
    assert_equal_state(theirs, optimizer)
    others.save_optimizer(theirs, tmp_path / "theirs.safetensors")
    booster, _, back = boosted(CPUAdam)
    booster.load_optimizer(back, tmp_path / "theirs.safetensors")
    assert_equal_state(back, optimizer)
    train(back.unwrap(), params_of(back))


# What is refused.


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": torch.tensor([0.1, 0.2])},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"nvme_offload_fraction": 1.5},
        {"nvme_offload_fraction": "half"},
    ],
)
def test_settings_that_can_not_work(settings):
    with pytest.raises(ConfigError):
        HybridAdam(parameters(), **settings)


@pytest.mark.parametrize("variant", ["amsgrad", "differentiable"])
def test_variants_that_there_are_not(variant):
    with pytest.raises(ConfigError, match=variant):
        CPUAdam([{"params": parameters(), variant: True}])
    optimizer = CPUAdam(parameters())
    state = torch.optim.AdamW(parameters(), **{variant: True}).state_dict()
    with pytest.raises(ConfigError, match=variant):
        optimizer.load_state_dict(state)
    assert not optimizer.param_groups[0].get(variant)


def test_sparse_gradients_and_complex_parameters():
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = CPUAdam(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="SparseAdam"):
        optimizer.step()
    assert not optimizer.state
    with pytest.raises(ConfigError, match="complex"):
        CPUAdam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


def test_cpu_adam_takes_the_cpu_only():
    with pytest.raises(ConfigError, match="HybridAdam"):
        CPUAdam([nn.Parameter(torch.zeros(3, device="meta"))])
    model = nn.Linear(2, 2)
    optimizer = CPUAdam(model.parameters())
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2, 2, device="meta"))
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(2, 2, device="meta")
    with pytest.raises(ConfigError, match="HybridAdam"):
        optimizer.step()


def test_gradients_of_another_shape():
    params = parameters()
    with pytest.raises(ConfigError, match=r"gradient of shape \(3,\)"):
        CPUAdam(params).fused_step(gradients={params[1]: torch.zeros(3)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias_correction": (0.9, 0.95)}, "by keyword"),  # betas, in torch's order of arguments
        ({"adamw_mode": "false"}, "adamw_mode must be a bool, got 'false'"),
        ({"lr": "1e-3"}, "lr='1e-3'"),
        ({"lr": True}, "lr=True"),
        ({"eps": "1e-8"}, "eps='1e-8'"),
        ({"weight_decay": "x"}, "weight_decay='x'"),
        ({"betas": 0.9}, "2 numbers"),
        ({"betas": (0.9, 0.99, 0.999)}, "2 numbers"),
        ({"betas": "ab"}, "2 numbers"),
        ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": 3}, "is not a path"),
        ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": ""}, "is not a path"),
        ({"nvme_offload_dir": "somewhere"}, "would stay empty"),
    ],
)
def test_arguments_of_another_kind(arguments, message):
    with pytest.raises(ConfigError, match=message):
        HybridAdam([nn.Parameter(torch.zeros(2))], **arguments)


def test_a_state_of_another_optimizer_or_model():
    def stepped(cls, shape, **arguments):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones(shape)
        optimizer = cls([parameter], lr=0.1, **arguments)
        optimizer.step()
        return optimizer

    ours = stepped(HybridAdam, (4, 6))
    before = {key: value.clone() for key, value in next(iter(ours.state.values())).items()}
    for other, message in (
        (stepped(HybridAdam, (6, 4)), r"shape \(6, 4\) for a parameter of shape \(4, 6\)"),
        (stepped(torch.optim.AdamW, (3, 8)), r"shape \(3, 8\) for a parameter of shape \(4, 6\)"),
        (stepped(torch.optim.SGD, (4, 6), momentum=0.9), "no 'betas'.*other than Adam"),
        (stepped(torch.optim.Adamax, (4, 6)), "no 'exp_avg_sq'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ours.load_state_dict(other.state_dict())
    after = next(iter(ours.state.values()))
    assert all(torch.equal(after[key], value) for key, value in before.items())
