"""Small training scripts, as a user would write them: each runs as it is on a CPU, and on a GPU where there is one."""

_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
"""

# The host makes a batch and the device gets it: what is done in `make_batch` differs by device, and is not compared.
GPT = (
    _HEAD
    + """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
    def forward(self, x):
        with torch.autocast(device, enabled=False):
            x = x.float()
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = Norm(width), Norm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))

class Decoder(nn.Module):
    def __init__(self, words=512, width=128, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def make_batch():
    tokens = torch.randint(512, (4, 65))
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
"""
)

SCRIPTS = {
    "decoder, bf16 autocast, accumulation, clipping": GPT
    + """
model = Decoder().to(device)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3, foreach=True)
for step in range(5):
    for _ in range(3):
        x, y = make_batch()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x, y) / 3
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item() * 3)
""",
    "ResNet, SGD with momentum": _HEAD
    + """
class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.a, self.b = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
    def forward(self, x):
        y = F.relu(self.norm_a(self.a(x)), inplace=True)
        return F.relu(self.norm_b(self.b(y)) + self.skip(x), inplace=True)

model = nn.Sequential(
    nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4, foreach=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)

def make_batch():
    return torch.randn(8, 3, 64, 64).to(device), torch.randint(10, (8,)).to(device)

for step in range(5):
    images, labels = make_batch()
    optimizer.zero_grad()
    outputs = model(images)
    loss = loss_of(outputs, labels)
    correct = (outputs.argmax(1) == labels).float().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(loss.item(), correct.item())
""",
    "transformers GPT-2": _HEAD
    + """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(
    n_embd=96, n_layer=2, n_head=4, vocab_size=400, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

def make_batch():
    return torch.randint(400, (4, 48)).to(device)

for step in range(5):
    tokens = make_batch()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "transformers BERT": _HEAD
    + """
from transformers import BertConfig, BertForSequenceClassification
model = BertForSequenceClassification(BertConfig(
    hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=384, vocab_size=500, num_labels=3,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
), ).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, amsgrad=True)

def make_batch():
    return {"input_ids": torch.randint(500, (6, 40)).to(device), "labels": torch.randint(3, (6,)).to(device)}

for step in range(5):
    model(**make_batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "timm ConvNeXt": _HEAD
    + """
import timm
model = timm.create_model("convnext_atto", num_classes=10).to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

def make_batch():
    return torch.randn(2, 3, 64, 64).to(device), torch.randint(10, (2,)).to(device)

for step in range(5):
    images, labels = make_batch()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "timm ViT": _HEAD
    + """
import timm
model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=3).to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, foreach=True)

def make_batch():
    return torch.randn(4, 3, 64, 64).to(device), torch.randint(10, (4,)).to(device)

for step in range(5):
    images, labels = make_batch()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "LSTM": _HEAD
    + """
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(300, 64), nn.LSTM(64, 96, 2, batch_first=True), nn.Linear(96, 300)
    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens))[0])

torch.backends.mkldnn.set_flags(False)  # its kernels for layers have no counts of FLOPs
model = Language().to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, foreach=True)

def make_batch():
    return torch.randint(300, (8, 20)).to(device)

for step in range(5):
    tokens = make_batch()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "LoRA over frozen layers": _HEAD
    + """
class Adapted(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.01 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2.0

layers = [nn.Sequential(nn.LayerNorm(192), Adapted(nn.Linear(192, 768)), nn.SiLU(), Adapted(nn.Linear(768, 192)))
          for _ in range(3)]
model = nn.Sequential(*layers, nn.LayerNorm(192)).to(device)
for name, parameter in model.named_parameters():
    parameter.requires_grad_(name.endswith((".a", ".b")))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)

def make_batch():
    return torch.randn(64, 192).to(device)

for step in range(5):
    x = make_batch()
    F.mse_loss(model(x), x).backward()
    nn.utils.clip_grad_value_(trained, 0.5, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
""",
    "activation checkpointing": GPT
    + """
from torch.utils.checkpoint import checkpoint
class Thrifty(Decoder):
    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(number % 2), preserve_rng_state=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

model = Thrifty(layers=4).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True, weight_decay=0.1)
for step in range(5):
    model(*make_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "Muon and AdamW": GPT
    + """
model = Decoder().to(device)
hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
known = {id(p) for p in hidden}
optimizers = [
    torch.optim.Muon(hidden, lr=0.02),
    torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=1e-3, foreach=True),
]
for step in range(5):
    model(*make_batch()).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
""",
    "averaged weights (EMA)": _HEAD
    + """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3, foreach=True)

def make_batch():
    return torch.randn(32, 128).to(device), torch.randint(8, (32,)).to(device)

for step in range(5):
    x, y = make_batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    average.update_parameters(model)
    optimizer.zero_grad()
""",
    "optimizer in the backward pass": _HEAD
    + """
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.Tanh()))).to(device)
optimizers = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)

def make_batch():
    return torch.randn(128, 256).to(device)

for step in range(5):
    x = make_batch()
    (model(x) - x).square().mean().backward()
""",
    "Adafactor, dropout, float16 with a scaler": _HEAD
    + """
model = nn.Sequential(
    nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.Sigmoid(), nn.Linear(512, 128)
).to(device)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, foreach=True)
scaler = torch.amp.GradScaler(device)

def make_batch():
    return torch.randn(64, 128).to(device)

for step in range(5):
    x = make_batch()
    with torch.autocast(device, dtype=torch.float16):
        loss = (model(x).float() - x).abs().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
}

DISTRIBUTED = """
import sys, torch
from torch import nn
import torch.distributed as dist
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
kind = sys.argv[1]
dist.init_process_group("nccl" if gpu else "gloo")
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(512, 512)   # declared first, used last
        self.first = nn.Linear(512, 700)
        self.norm = nn.BatchNorm1d(700)
        self.second = nn.Linear(700, 512)
        self.table = nn.Parameter(torch.zeros(512))
        self.idle = nn.Linear(600, 900) if kind == "ddp-unused" else None  # in no pass
    def forward(self, x):
        return self.last(torch.relu(self.second(self.norm(self.first(x)))) + self.table)
model = Net().to(device)
if kind.startswith("ddp"):
    extra = {
        "ddp": {}, "ddp-unused": {"find_unused_parameters": True},
        "ddp-static": {"static_graph": True, "gradient_as_bucket_view": True},
    }[kind]
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1.5, **extra)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
elif kind == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1.5)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (model.first, model.second, model.last):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
elif kind == "tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
    ).to(device)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel(), "5": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
width = 64 if kind == "tp" else 512
def make_batch():
    return torch.randn(16, width).to(device)

for step in range(5):
    for micro in range(2):
        model(make_batch()).square().mean().backward()
    if kind == "fsdp":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
"""
