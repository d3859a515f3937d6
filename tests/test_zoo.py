"""The zoo: parameter counts against TicTac's Table 1 and known totals, real training steps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from ddltool.errors import InputError
from ddltool.fixtures import zoo

TABLE1 = [name for name, entry in zoo.ZOO.items() if entry.published is not None]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name)


def test_table1_is_whole() -> None:
    assert len(TABLE1) == 10


@pytest.mark.parametrize("name", TABLE1)
def test_parameters_equal_table1(name: str) -> None:
    published = zoo.entry(name).published
    assert published is not None
    parameters = list(on_meta(name).parameters())
    assert len(parameters) == published.parameters
    mib = sum(value.numel() for value in parameters) * 4 / 2**20
    assert mib == pytest.approx(published.parameter_mib, rel=0.001)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("resnet32", 464_154),
        ("cifarnet", 1_756_426),
        ("resnet50_v1", 25_557_032 - 26_560),  # torchvision's ResNet-50 less its batch-norm scales
    ],
)
def test_known_totals(name: str, count: int) -> None:
    assert sum(value.numel() for value in on_meta(name).parameters()) == count


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_shapes_in_both_modes(name: str) -> None:
    with torch.device("meta"):
        model, inputs = zoo.build(name), zoo.example_inputs(name, 2)
        targets = model.example_targets(2)
        outputs = model.train()(*inputs)
        assert model.loss(outputs, targets).shape == ()
        logits = model.eval()(*inputs)
    classes = {"gpt_small": 8192, "bert_small": 2, "resnet32": 10, "cifarnet": 10}.get(name, 1000)
    assert logits.shape == ((2, 128, classes) if name == "gpt_small" else (2, classes))
    assert isinstance(outputs, tuple) == (name == "inception_v3")
    assert zoo.example_inputs(name, 1)[0].shape[0] == 1


@pytest.mark.parametrize("name", ["cifarnet", "resnet32", "gpt_small", "bert_small"])
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.build(name), zoo.example_inputs(name, 2)
    targets = model.example_targets(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model.loss(model(*inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_the_auxiliary_head_counts_in_the_loss() -> None:
    from ddltool.fixtures.zoo.inception import InceptionV3

    with torch.device("meta"):
        model = InceptionV3(classes=5)
    logits, targets = torch.randn(2, 5), torch.tensor([1, 2])
    plain = nn.functional.cross_entropy(logits, targets)
    assert model.loss((logits, logits), targets) == pytest.approx(1.4 * plain.item())
    assert model.loss(logits, targets) == pytest.approx(plain.item())


def test_an_unknown_name() -> None:
    with pytest.raises(InputError, match="zoo:resnet50: unknown model 'resnet50'; did you mean \"resnet50_v[12]\""):
        zoo.entry("resnet50")


def test_listing_needs_no_torch() -> None:
    code = "import sys\nfrom ddltool.fixtures import zoo\nassert zoo.ZOO\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
