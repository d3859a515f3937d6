"""Scripts that need what is not here: packages, weights, hubs, other ranks. Each is small, and states one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ddltool.analyzers.step.recording import vision
from ddltool.analyzers.step.recording.command import assumed, record
from ddltool.analyzers.step.recording.downloads import _published_fields
from ddltool.analyzers.step.recording.kernels import PACKAGES
from ddltool.analyzers.step.recording.packages import ABSENT, Inert, missing
from ddltool.errors import InputError
from ddltool.graph import Graph, Recorded
from ddltool.published_models import published_models

HEAD = "import torch\nfrom torch import nn\n"
Recording = Callable[..., Graph]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Return what records a script of some lines, after the imports."""

    def run(body: str, *launcher: str) -> Graph:
        (tmp_path / "train.py").write_text(HEAD + body)
        monkeypatch.chdir(tmp_path)
        return record([*(launcher or ("python",)), "train.py"], gpus_per_node=8, shows=False)

    return run


def facts(graph: Graph) -> Recorded:
    assert graph.recorded is not None
    return graph.recorded


def ops_of(graph: Graph) -> Counter[str]:
    return Counter(graph.op_type)


def test_packages_of_kernels_have_the_ops_of_their_arithmetic(recorded: Recording) -> None:
    """Attention of flash_attn and xformers, layers and optimizers of liger and bitsandbytes, Triton, a tracker."""
    graph = recorded("""
import tracker_of_nobody as tracker, wandb
from flash_attn import flash_attn_func, flash_attn_varlen_func
from xformers.ops import LowerTriangularMask, memory_efficient_attention
from liger_kernel.transformers import LigerRMSNorm
import bitsandbytes as bnb
import triton, triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])
@triton.jit
def scale(x, n, BLOCK: tl.constexpr):
    tl.store(x, 0)

arch = triton.runtime.driver.active.get_current_target().arch
assert arch == 90 or not isinstance(arch, int), arch

@tracker.timed
def attend(q, k, v):
    starts = torch.arange(5, device="cuda", dtype=torch.int32) * 128
    flat = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, starts, 128, 128, causal=True)
    efficient = memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())
    return flash_attn_func(q, k, v, causal=True) + flat.view(q.shape) + efficient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = LigerRMSNorm(256), nn.Linear(256, 768)
        self.out = bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.bfloat16)
    def forward(self, x):
        return self.out(attend(*self.qkv(self.norm(x)).view(4, 128, 3, 4, 64).unbind(2)).flatten(2))

wandb.init(project="none", config={"lr": 0.5})
tracker.start().watch(["loss"], every=wandb.config.lr)
net = Net().cuda().bfloat16()
optimizer = bnb.optim.AdamW8bit(net.parameters(), lr=wandb.config.lr)
for step in range(2):
    x = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16)
    with tracker.span("step"):
        net(x).float().square().mean().backward()
    scale[lambda meta: (4,)](x, 3)
    optimizer.step()
    optimizer.zero_grad()
    tracker.log({"step": step})
""")
    ops = ops_of(graph)
    assert (
        ops["aten._scaled_dot_product_flash_attention"] == ops["aten._scaled_dot_product_flash_attention_backward"] == 3
    )
    assert ops["aten.dequantize"] == 2  # for the product, and again for its gradient
    assert ops["aten.kernel"] == 1
    assert ops["aten.update"] == 3  # the norm's weight, the projection's weight and bias
    packed = next(op for op in graph.ops() if op.op_type == "aten.dequantize")
    assert packed.written_bytes == 2 * 256 * 256
    assert packed.size_bytes - packed.written_bytes == 256 * 256 / 2 + 4 * 256 * 256 / 64  # nibbles, and a scale for 64
    held: Counter[str] = Counter()
    for part, size, made in zip(facts(graph).parts, facts(graph).storage_bytes, facts(graph).made, strict=True):
        held[part] += int(size) if made < 0 else 0
    weight = 768 * 256
    assert held["optimizer"] == 2 * (weight + 4 * weight / 256 + 4 * (256 + 768))  # small ones keep float32
    said = str(assumed(graph))
    assert said.startswith("Stood in for, not installed here: ")
    assert {key.removeprefix(ABSENT) for key in facts(graph).assumed if key.startswith(ABSENT)} == {
        "tracker_of_nobody", "wandb", "flash_attn", "xformers", "liger_kernel", "bitsandbytes",
    } | ({"triton"} if find_spec("triton") is None else set())  # fmt: skip


def test_a_package_whose_work_is_needed_is_named(recorded: Recording) -> None:
    with pytest.raises(InputError, match="stood in for, not installed here: numbers_of_nobody") as raised:
        recorded("import numbers_of_nobody\nnet = nn.Linear(numbers_of_nobody.width(), 4).cuda()\n")
    assert "pip install numbers_of_nobody" in str(raised.value)


def test_who_is_missing() -> None:
    """By the error, by its cause, and by what it says of a package."""
    failed = RuntimeError("cannot go on")
    failed.__cause__ = ModuleNotFoundError("No module named 'package_of_nobody.part'", name="package_of_nobody.part")
    assert missing(failed) == ["package_of_nobody"]
    assert missing(ImportError("FlashAttention2 cannot be used: the package flash_attn is not installed")) == [
        "flash_attn"
    ]
    assert missing(ImportError("please pip install tracker-of-nobody")) == ["tracker_of_nobody"]
    assert missing(ImportError("cannot import name 'Nadam' from 'torch.optim'")) == []
    assert missing(ModuleNotFoundError("No module named 'torch.part_of_nobody'", name="torch.part_of_nobody")) == []
    assert missing(ValueError("lr is negative")) == []


def test_an_inert_thing_is_no_number() -> None:
    inert = Inert("nobody")
    assert not inert.some.thing(1)["key"]
    assert list(inert) == []
    assert inert(len) is not len  # only functions and classes of Python are decorated
    assert inert(facts) is facts
    with pytest.raises(TypeError):
        torch.ones(1) * inert  # type: ignore[operator]
    with pytest.raises(TypeError):
        range(inert)  # type: ignore[call-overload]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_stand_ins_are_under_their_package_s_name(package: str) -> None:
    assert all(name.startswith(f"{package}.") or name == "*" for name in PACKAGES[package]())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None or find_spec("torchvision") is None, reason="needs both")
def test_models_come_from_configurations_without_weights(recorded: Recording) -> None:
    """A folder with a configuration alone, a name that is well known, weights that a model library would fetch."""
    graph = recorded("""
import json, pathlib, torchvision
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
net = torchvision.models.squeezenet1_1(weights="DEFAULT")
sizes = dict(model_type="gpt2", n_embd=64, n_layer=1, n_head=2, vocab_size=512, architectures=["GPT2LMHeadModel"])
pathlib.Path("model").mkdir()
pathlib.Path("model/config.json").write_text(json.dumps(sizes))
small = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16, device_map="cuda")
assert small.config.n_embd == 64 and not small.training and small.lm_head.weight.is_cuda
asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
name = "HuggingFaceTB/SmolLM2-135M-Instruct"
llama = AutoModelForCausalLM.from_pretrained(name, num_hidden_layers=2, quantization_config=asked)
layer = llama.model.layers[0].mlp.up_proj
assert layer.weight.numel() == 576 * 1536 // 2 and llama.lm_head.weight.shape == (49152, 576), layer
words = AutoTokenizer.from_pretrained("bert-base-uncased")(["a sentence of words"] * 2, return_tensors="pt")["input_ids"]
assert words[0, 0] == words[1, 0] and words.shape == (2, 9), words.shape
small.train()
optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
for _ in range(2):
    small(input_ids=words.cuda() % 512, labels=words.cuda() % 512).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    assert graph.meta["dtype"] == "bfloat16"
    assert graph.batch_size == 2


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_published_configurations_name_a_class_that_transformers_has() -> None:
    """What trainers build by ``config.architectures``, and weights in the type that ``from_pretrained`` loads."""
    vision.declare_torchvision()
    import transformers

    for model in published_models().values():
        fields = _published_fields(model.name)
        assert (fields is None) == (model.library != "transformers"), model
        assert fields is None or all(hasattr(transformers, name) for name in fields["architectures"]), fields
    llama = _published_fields("unsloth/Llama-3.1-8B-Instruct")  # a copy under another organisation
    assert llama is not None
    assert (llama["architectures"], llama["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    for name, architecture in (
        *(
            ("gpt2", "GPT2LMHeadModel"),
            ("bert-base-uncased", "BertForMaskedLM"),
            ("t5-small", "T5ForConditionalGeneration"),
        ),
        *(
            ("whisper-tiny", "WhisperForConditionalGeneration"),
            ("google/vit-base-patch16-224", "ViTForImageClassification"),
        ),
    ):
        assert (_published_fields(name) or {})["architectures"] == [architecture]
    assert _published_fields("nobody/model-of-nobody") is None


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_what_a_run_would_fetch_is_said_at_once(recorded: Recording) -> None:
    with pytest.raises(InputError, match="fetch it before, or give a path of this disk"):
        recorded("import transformers\ntransformers.AutoConfig.from_pretrained('nobody/model-of-nobody')\n")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_detection_records_with_torchvision_s_operators_stood_in_for(recorded: Recording) -> None:
    graph = recorded("""
import torchvision
net = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights=None, weights_backbone="DEFAULT", num_classes=5, box_batch_size_per_image=64).cuda()
target = {"boxes": torch.tensor([[10.0, 10.0, 90.0, 90.0]]).cuda(), "labels": torch.tensor([1]).cuda()}
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
for _ in range(2):
    with torch.autocast("cuda"):
        losses = net([torch.rand(3, 128, 160).cuda() for _ in range(2)], [target] * 2)
    sum(losses.values()).backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    ops = ops_of(graph)
    assert ops["aten.nms"] == 2  # the proposals of each image
    assert ops["aten.roi_align"] == ops["aten._roi_align_backward"] > 0
    assert graph.batch_size == 2


@pytest.mark.parametrize("name", ["_C.so", "_C.cpython-313-x86_64-linux-gnu.so", "_C_stable.so"])
def test_a_torchvision_that_loads_is_left_to_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (name, "_C.pyi", "__init__.py"):
        (tmp_path / made).write_text("")
    spec = ModuleSpec("torchvision", None, origin=str(tmp_path / "__init__.py"))
    loaded: list[str] = []
    monkeypatch.setattr(vision.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert vision.declare_torchvision.__wrapped__() is None
    assert loaded == [str(tmp_path / name)]


def test_a_pipeline_s_first_stage_and_flexible_attention_record(recorded: Recording) -> None:
    graph = recorded("""
import os
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("nccl")
mask = torch.compile(create_block_mask)(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cuda")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 384)
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4)
        return x + flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)

stage = PipelineStage(Block().cuda().bfloat16(), rank, world, torch.device("cuda"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
for _ in range(3):
    schedule.step(torch.randn(8, 128, 128, device="cuda", dtype=torch.bfloat16))
    optimizer.step()
    optimizer.zero_grad()
""", "torchrun", "--nproc-per-node", "4")  # fmt: skip
    ops = ops_of(graph)
    assert (
        ops["aten._scaled_dot_product_flash_attention"] == ops["aten._scaled_dot_product_flash_attention_backward"] == 4
    )
    assert ops["c10d.send"] == ops["c10d.recv"] == 4  # activations go on, their gradients come back
    assert facts(graph).passes == 4
    assert "stages wait for each other is not counted" in str(assumed(graph))


def test_old_names_other_ranks_and_graphs(recorded: Recording) -> None:
    """Tensor types of torch's first years, processes that the script starts of itself, a CUDA graph that is replayed."""
    graph = recorded("""
import subprocess, sys
from torch._six import inf
Old = torch.cuda.FloatTensor
z = torch.randn(3, 2).type(Old)
assert isinstance(z, Old) and z.type() == "torch.cuda.FloatTensor" and Old(4, 1).fill_(inf).is_cuda
assert z.new([[1, 2]]).shape == (1, 2) and z.new(3, 4).is_cuda and not isinstance(torch.randn(1), Old)
means, _ = torch.batch_norm_stats(torch.randn(2, 4, 3).cuda().half(), 1e-5)  # of nn.SyncBatchNorm
assert means.dtype == torch.float32 and means.shape == (4,)
other = subprocess.Popen([sys.executable, "train.py"], env={"LOCAL_RANK": "1"})
assert other.poll() is None and subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True).stdout == b"3\\n"
try:
    from flash_attn import flash_attn_func
except ImportError:  # a package that a script can do without stays away
    flash_attn_func = None
assert flash_attn_func is None
net = nn.Linear(8, 4)
net.weight.label = "first"
net = net.cuda().double().float()
assert net.weight.label == "first" and net.weight.is_cuda
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
x, cuda_graph = torch.randn(2, 8).cuda(), torch.cuda.CUDAGraph()
with torch.cuda.graph(cuda_graph):
    net(x).sum().backward()
for _ in range(2):
    cuda_graph.replay()
    optimizer.step()
""")
    ops = ops_of(graph)
    assert ops["aten.addmm"] == 1
    assert ops["aten.mm"] == 1  # the weight's gradient; the input has none
    assert assumed(graph) == ""
