"""What a script would download, where only sizes count: models are built from their configurations, without weights.

Nothing is asked of a network: hubs' libraries are told that they are offline. Start at :func:`stand_in_downloads`.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.step.recording.packages import Inert

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
# What from_pretrained takes that says where a file comes from and how it is read.
_OF_LOADING = (
    "cache_dir", "ignore_mismatched_sizes", "force_download", "local_files_only", "token", "use_auth_token", "revision",
    "use_safetensors", "weights_only", "fusion_config", "disable_mmap", "low_cpu_mem_usage", "device_map", "max_memory",
    "offload_folder", "offload_state_dict", "variant", "adapter_kwargs", "from_tf", "from_flax", "subfolder", "state_dict",
    "trust_remote_code", "code_revision", "proxies", "resume_download", "output_loading_info", "tp_plan", "_fast_init",
    "key_mapping", "gguf_file", "use_flash_attention_2", "load_in_8bit", "load_in_4bit", "quantization_config", "dtype",
    "torch_dtype", "commit_hash", "_commit_hash", "_from_auto", "tp_size", "device_mesh", "use_kernels", "keep_in_fp32_modules",
)  # fmt: skip
_OF_CONFIGURATIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "trust_remote_code",
)


def stand_in_downloads(device: torch.device) -> dict[str, Callable[[Any], None]]:
    """Let hubs not be asked, unless a variable says so, and weights be left as they are made.

    Returns by its name what changes each library that downloads: models come from configurations, small known data sets
    are blank.
    """
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    real_list: Any = torch.hub.list

    def listed(*args: Any, **kwargs: Any) -> Any:
        try:
            return real_list(*args, **kwargs)
        except OSError:  # scripts ask what there is, to offer it
            return []

    torch.hub.list = listed
    torch.hub.load_state_dict_from_url = lambda *_, **__: OrderedDict()
    real_load = nn.Module.load_state_dict

    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not state_dict:  # weights that were not fetched
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return real_load(self, state_dict, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    return {
        "transformers.modeling_utils": lambda module: _from_configuration(module, device),
        "transformers.configuration_utils": _known_configurations,
        "diffusers.models.modeling_utils": lambda module: _diffusers_models(module, device),
        "timm.models._builder": _without_weights,
        "timm.models.helpers": _without_weights,
        "torchvision.datasets.mnist": _blank_digits,
        "torchvision.datasets.cifar": _blank_pictures,
        "tiktoken.registry": _encodings,
        "transformers.tokenization_utils_base": _blank_tokenizers,
        "evaluate.loading": _inert_metrics,
    }


def _from_configuration(module: Any, device: torch.device) -> None:
    """Let transformers' models be built from their configurations: what their weights are has no part in a step."""

    def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        asked = {key: kwargs.pop(key) for key in _OF_LOADING if key in kwargs}
        if isinstance(config, module.PreTrainedConfig):
            config = copy.deepcopy(config)
            for key in [key for key in kwargs if hasattr(config, key) and not key.startswith("attn_impl")]:
                setattr(config, key, kwargs.pop(key))
        else:
            given = {key: asked[key] for key in _OF_CONFIGURATIONS if key in asked}
            config, kwargs = cls.config_class.from_pretrained(
                config or name, return_unused_kwargs=True, **given, **kwargs
            )
        dtype = asked.get("dtype") or asked.get("torch_dtype") or "auto"
        dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
        config.name_or_path = str(name)
        model = cls._from_config(config, *args, dtype=dtype, **kwargs).eval()
        quantization = asked.get("quantization_config") or getattr(config, "quantization_config", None)
        for bits in (4, 8):
            if asked.get(f"load_in_{bits}bit") or _of(quantization, f"load_in_{bits}bit"):
                _pack(model, bits, _of(quantization, "bnb_4bit_compute_dtype"), quantization)
        if asked.get("device_map") not in (None, "cpu", {"": "cpu"}):
            model = model.to(device)
        told: dict[str, list[str]] = {
            "missing_keys": [],
            "unexpected_keys": [],
            "mismatched_keys": [],
            "error_msgs": [],
        }
        return (model, told) if asked.get("output_loading_info") else model

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _of(options: Any, name: str) -> Any:
    return options.get(name) if isinstance(options, dict) else getattr(options, name, None)


def _pack(model: Any, bits: int, dtype: Any, quantization: Any) -> None:
    """Let a model's linear layers but the head hold weights of few bits, as bitsandbytes replaces them."""
    import bitsandbytes  # type: ignore[import-not-found]  # stood in for where it is not installed

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                kind = bitsandbytes.nn.Linear4bit if bits == 4 else bitsandbytes.nn.Linear8bitLt
                layer = kind(child.in_features, child.out_features, child.bias is not None, compute_dtype=dtype)
                setattr(parent, name, layer)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=False, is_serializable=lambda *_, **__: True,
                                         quantization_config=quantization)  # fmt: skip


def _known_configurations(module: Any) -> None:
    """Let configurations of well-known models be at hand by their names on the hub."""
    real = module.PreTrainedConfig._get_config_dict.__func__

    def _get_config_dict(cls: Any, /, name: Any, **kwargs: Any) -> Any:
        try:
            return real(cls, name, **kwargs)
        except OSError:
            known = _CONFIGURATIONS.get(_plain(str(name)))
            if known is None:
                raise
            return {**known, "_name_or_path": str(name)}, {
                key: value for key, value in kwargs.items() if key not in _OF_CONFIGURATIONS and key[0] != "_"
            }

    module.PreTrainedConfig._get_config_dict = classmethod(_get_config_dict)


def _plain(name: str) -> str:
    """Return a model's name without its owner, and without what says that only its weights are others.

    >>> _plain("meta-llama/Meta-Llama-3-8B-Instruct")
    'llama-3-8b'
    """
    return re.sub(r"^meta-|-(instruct|chat|it|base|hf)(?=-|$)", "", name.rpartition("/")[2].lower())


_CONFIGURATIONS: dict[str, Any] = {
    _plain(name): fields
    for family in tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8")).values()
    for name, fields in family.items()
}


def _diffusers_models(module: Any, device: torch.device) -> None:
    """Let diffusers' models be built from their configurations."""

    def from_pretrained(cls: Any, /, name: Any, **kwargs: Any) -> Any:
        asked = {key: kwargs.pop(key) for key in _OF_LOADING if key in kwargs}
        given = {key: asked[key] for key in _OF_CONFIGURATIONS if key in asked}
        config, kwargs = cls.load_config(name, return_unused_kwargs=True, **given, **kwargs)
        model = cls.from_config(config, **kwargs).eval()
        return model.to(asked.get("torch_dtype") or torch.float32)

    module.ModelMixin.from_pretrained = classmethod(from_pretrained)


def _without_weights(module: Any) -> None:
    """Let timm's models keep the weights that they are made with."""
    module.load_pretrained = lambda *_, **__: None


def _blank_digits(module: Any) -> None:
    import numpy as np

    def fill(dataset: Any) -> None:
        samples = 60_000 if dataset.train else 10_000
        dataset.data = torch.from_numpy(np.zeros((samples, 28, 28), dtype=np.uint8))
        dataset.targets = torch.from_numpy(np.arange(samples) % 10)

    _blank(module.MNIST, fill)


def _blank_pictures(module: Any) -> None:
    import numpy as np

    def fill(dataset: Any) -> None:
        classes = 100 if issubclass(type(dataset), module.CIFAR100) else 10
        samples = 50_000 if dataset.train else 10_000
        dataset.data = np.zeros((samples, 32, 32, 3), dtype=np.uint8)
        dataset.targets = [place % classes for place in range(samples)]
        dataset.classes = [f"class {number}" for number in range(classes)]
        dataset.class_to_idx = {name: number for number, name in enumerate(dataset.classes)}

    _blank(module.CIFAR10, fill)


def _blank(kind: Any, fill: Callable[[Any], None]) -> None:
    """Let a data set of known size hold blank samples where its files are not here."""
    real, blank = kind.__init__, set()

    def init(self: Any, root: Any, train: bool = True, transform: Any = None, target_transform: Any = None,
             download: bool = False, **_: Any) -> None:  # fmt: skip
        try:
            real(self, root, train, transform, target_transform, download=False)
        except RuntimeError:
            if not download and str(root) not in blank:
                raise
            blank.add(str(root))  # its other half, too
            fill(self)

    kind.__init__ = init


def _inert_metrics(module: Any) -> None:
    """Let a metric that is not here say nothing: it has no part in a step."""
    real = module.load

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(path, *args, **kwargs)
        except (OSError, ImportError):
            return Inert(f"evaluate.load({path!r})")

    module.load = load


def _blank_tokenizers(module: Any) -> None:
    """Let the tokenizers of well-known models that are not here split words into pieces of three letters."""
    real = module.PreTrainedTokenizerBase.from_pretrained.__func__

    def from_pretrained(cls: Any, /, name: Any, *args: Any, **kwargs: Any) -> Any:
        known = _CONFIGURATIONS.get(_plain(str(name)))
        try:
            found = real(cls, name, *args, **kwargs)
        except OSError:
            if known is None:
                raise
            return _pieces(str(name), known)
        # Some classes are content without a vocabulary.
        return found if known is None or len(found) >= _LEAST_TOKENS else _pieces(str(name), known)

    module.PreTrainedTokenizerBase.from_pretrained = classmethod(from_pretrained)


_LEAST_TOKENS = 1000


def _pieces(name: str, known: dict[str, Any]) -> Any:
    """Return a tokenizer with the special tokens of a model's family: about as many tokens as its own makes of English."""
    from itertools import product
    from string import ascii_lowercase

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    is_encoder = known["model_type"] in ("bert", "distilbert", "roberta")
    special = (
        {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        if is_encoder
        else {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        | ({"pad_token": "<pad>"} if known["model_type"] not in ("gpt2", "llama", "mistral") else {})
    )
    letters = [chr(code) for code in range(33, 127)]
    syllables = ["".join(pair) for length in (2, 3) for pair in product(ascii_lowercase, repeat=length)]
    words = dict.fromkeys([*special.values(), *letters, *syllables])
    split = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)},
                                       unk_token=special["unk_token"], continuing_subword_prefix=""))  # fmt: skip
    split.normalizer = normalizers.Lowercase()
    split.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if is_encoder:
        split.post_processor = processors.BertProcessing(
            ("[SEP]", _place(words, "[SEP]")), ("[CLS]", _place(words, "[CLS]"))
        )
    length = {"bert": 512, "distilbert": 512, "roberta": 512, "gpt2": 1024}.get(known["model_type"], 2048)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, model_max_length=length, **special)
    tokenizer.name_or_path = name
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    )
    return tokenizer


def _place(words: dict[str, None], word: str) -> int:
    return list(words).index(word)


_VOCABULARIES = {
    "gpt2": 50_257,
    "r50k_base": 50_257,
    "p50k_base": 50_281,
    "cl100k_base": 100_277,
    "o200k_base": 200_019,
}


def _encodings(module: Any) -> None:
    """Let tiktoken's encodings that are not in its cache be of bytes, with as many tokens."""
    real = module.get_encoding

    def get_encoding(name: str) -> Any:
        try:
            return real(name)
        except Exception:  # as many kinds as there are networks
            if name not in _VOCABULARIES:
                raise
        import tiktoken  # type: ignore[import-not-found]

        tokens = _VOCABULARIES[name]
        ranks = {bytes([place]): place for place in range(256)}
        ranks |= {b"\xff" + place.to_bytes(3, "big"): place for place in range(256, tokens - 1)}
        end = {"<|endoftext|>": tokens - 1}
        return tiktoken.Encoding(
            name, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end, explicit_n_vocab=tokens
        )

    module.get_encoding = get_encoding
