"""What people search for leads to the page that answers it: asked of the site's own index, by the code of its pages."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.house.test_site import ROOT, build

pytest.importorskip("mkdocstrings")
NODE = shutil.which("node")
WORDS = tomllib.loads((ROOT / "docs" / "words.toml").read_text("utf-8"))

FIRST = {
    "dollars": "decide", "cost": "decide", "lora": "predict", "custom GPU": "devices", "fp8": "predict", "OOM": "sharding",
    "ethernet": "network", "slow rank": "stragglers", "huggingface": "integrations show",
}  # fmt: skip
"""What comes first, one of several pages."""
AMONG_THREE = {
    "price": "decide plan", "budget": "decide plan", "out of memory": "sharding", "will it fit": "sharding",
    "straggler": "stragglers", "trainer": "integrations", "lightning": "integrations", "accelerate": "integrations emit",
    "deepspeed": "emit", "slurm": "emit init", "kubernetes": "emit init", "fsdp": "sharding data-parallel",
    "hsdp": "sharding", "bucket size": "data-parallel", "gradient accumulation": "predict", "mfu": "predict",
    "activation checkpointing": "predict sharding", "tokens per second": "predict", "throughput": "predict goodput fit",
    "batch size": "goodput profile", "torch.compile": "predict", "mixed GPUs": "decide plan est",
    "unequal batches": "balance balance-live", "padding": "lengths", "sequence length": "lengths predict",
    "nccl": "network calibrate", "infiniband": "network", "spot instances": "companion autoscale", "CI": "gate",
    "regression": "gate", "github action": "gate", "notebook": "api", "python api": "api", "jupyter": "api",
    "how accurate": "truth", "reproducible": "determinism elastic", "same loss": "elastic diff-run",
    "diverge": "diff-run", "install": "index", "quickstart": "tutorial index", "exit code": "faq", "error": "faq",
    "tensor parallel": "predict", "timm": "predict trace", "onnx": "trace", "flash attention": "predict recorded-scripts",
    "tensorboard": "hook", "scheduler": "simulate", "time to train": "decide", "perfetto": "trace", "AMD": "devices",
    "vram": "sharding predict", "how many GPUs": "decide companion", "node failure": "simulate", "ZeRO-3": "sharding",
    "gradient compression": "network", "allreduce": "data-parallel devices network", "preemption": "companion elastic",
    "H100 vs A100": "predict", "hang": "stragglers", "profiler trace": "stragglers oracle-trace import", "wandb": "hook",
}  # fmt: skip


def test_the_words_are_of_pages_that_there_are() -> None:
    made = {"index", "changelog", "commands", "contributing", "security"}
    pages = made | {str(path.relative_to(ROOT / "docs"))[:-3] for path in (ROOT / "docs").rglob("*.md")}
    assert {*WORDS["pages"], *WORDS["last"]} <= pages
    for page, words in WORDS["pages"].items():
        assert len({*words}) == len(words), page


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="the pages' search is JavaScript: needs node")
def test_the_right_page_is_found(tmp_path: Path) -> None:
    made = build(ROOT / "mkdocs.yml", tmp_path)
    assert made.returncode == 0, made.stderr
    asked = FIRST | AMONG_THREE
    helper = ROOT / "tests" / "helpers" / "site_search.js"
    done = subprocess.run(
        [str(NODE), str(helper), str(tmp_path)],
        input=json.dumps(["zzyzzx", *asked]), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = {query: [page.removesuffix(".html") for page in pages] for query, pages in json.loads(done.stdout).items()}
    assert found["zzyzzx"] == []
    wrong = {
        query: found[query][:3]
        for query, pages in asked.items()
        if not {*pages.split()} & {*found[query][: 1 if query in FIRST else 3]}
    }
    assert wrong == {}
