"""What a measured step trains by: the update is that of torch's own loop, in the precision that is named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddltool.errors import InputError
from ddltool.runtime.measuring.training import (
    MEASURED,
    OPTIMIZERS,
    backward_and_update,
    checked_precision,
    prepared_module,
)

CPU = torch.device("cpu")
OWN = {
    "none": lambda ps: [],
    "sgd": lambda ps: [torch.optim.SGD(ps, lr=1e-3)],
    "momentum": lambda ps: [torch.optim.SGD(ps, lr=1e-3, momentum=0.9)],
    "adam": lambda ps: [torch.optim.Adam(ps, lr=1e-4)],
    "adamw": lambda ps: [torch.optim.AdamW(ps, lr=1e-4)],
    "muon": lambda ps: [torch.optim.Muon(ps[::2]), torch.optim.AdamW(ps[1::2], lr=1e-4)],  # weights, biases
    "adafactor": lambda ps: [torch.optim.Adafactor(ps)],
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_are_those_of_a_plain_loop(optimizer: str, precision: str) -> None:
    inputs = (torch.randn(5, 8, generator=torch.Generator().manual_seed(1)),)
    module, moved, computing = prepared_module(model(), inputs, precision, CPU)
    backward, update = backward_and_update(module, optimizer, precision, CPU)
    plain = model()
    own = OWN[optimizer.removeprefix("foreach-")](list(plain.parameters()))
    for _ in range(3):
        with computing():
            loss = module(*moved).square().mean()
        backward(loss)
        update()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            expected = plain(*inputs).square().mean()
        expected.backward()
        for each in own:
            each.step()
        plain.zero_grad()
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("precision", "kept", "computed"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("bf16-pure", torch.bfloat16, torch.bfloat16),
        ("fp16-pure", torch.float16, torch.float16),
    ],
)
def test_a_precision_keeps_and_computes_as_it_says(precision: str, kept: torch.dtype, computed: torch.dtype) -> None:
    tokens = torch.arange(5)
    module, (rows, same), computing = prepared_module(model(), (torch.randn(5, 8), tokens), precision, CPU)
    with computing():
        assert module(rows).dtype == computed
    assert {parameter.dtype for parameter in module.parameters()} == {kept}
    assert same.dtype == tokens.dtype


def test_fp16_scales_its_losses() -> None:
    module, inputs, computing = prepared_module(model(), (torch.randn(5, 8),), "fp16", CPU)
    backward, _ = backward_and_update(module, "sgd", "fp16", CPU)
    unscaled = copy.deepcopy(module)
    with computing():
        backward(module(*inputs).square().mean())
        unscaled(*inputs).square().mean().backward()
    first, own = (next(each.parameters()).grad for each in (module, unscaled))
    assert first is not None
    assert own is not None
    assert torch.allclose(first, 128 * own, rtol=0.05, atol=0.5)


def test_what_is_not_measured_is_refused() -> None:
    assert [checked_precision(name, "cuda") for name in MEASURED] == [*MEASURED]
    assert checked_precision("amp", "cpu") == "fp16"
    with pytest.raises(InputError, match=r"is 5%, a share; give --half-width 5%"):
        checked_precision("5%", "cpu")
    with pytest.raises(InputError, match="fp8 is not measured here"):
        checked_precision("fp8", "cuda")
