"""What a script would download, where only sizes count: models are built from their configurations, without weights.

Nothing is asked of a network: hubs' libraries are told that they are offline. Start at :func:`stand_in_downloads`.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.step.recording.packages import Inert
from ddltool.published_models import find_model

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
# Arguments of from_pretrained that say where a file comes from and how it is read.
_LOADING_OPTIONS = (
    "cache_dir", "ignore_mismatched_sizes", "force_download", "local_files_only", "token", "use_auth_token", "revision",
    "use_safetensors", "weights_only", "fusion_config", "disable_mmap", "low_cpu_mem_usage", "device_map", "max_memory",
    "offload_folder", "offload_state_dict", "variant", "adapter_kwargs", "from_tf", "from_flax", "subfolder", "state_dict",
    "trust_remote_code", "code_revision", "proxies", "resume_download", "output_loading_info", "tp_plan", "_fast_init",
    "key_mapping", "gguf_file", "use_flash_attention_2", "load_in_8bit", "load_in_4bit", "quantization_config", "dtype",
    "torch_dtype", "commit_hash", "_commit_hash", "_from_auto", "tp_size", "device_mesh", "use_kernels", "keep_in_fp32_modules",
)  # fmt: skip
# Those of them that the loading of a configuration takes, too.
_CONFIGURATION_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "trust_remote_code",
)


_DIGIT_SAMPLES = {"train": 60_000, "test": 10_000}
"""Images of 28 x 28 in MNIST and in the sets that are laid out like it, of ten classes."""
_PICTURE_SAMPLES = {"train": 50_000, "test": 10_000}
"""Images of 32 x 32 x 3 in CIFAR-10 and CIFAR-100."""


def stand_in_downloads(device: torch.device) -> dict[str, Callable[[Any], None]]:
    """Let the process download nothing: libraries of hubs are set to offline, and weights stay as they are initialised.

    ``device``: the recorded device, where models go that are asked to be placed. Environment variables that the user has
    set stay as they are; functions of torch are replaced for good. Returns, by the name of a module that downloads, a
    function that patches this module once it is imported. Models are then built from their configurations, and small
    known data sets are blank.
    """
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    real_list: Any = torch.hub.list

    def list_or_nothing(*args: Any, **kwargs: Any) -> Any:
        """Return the names of a hub repository's models, [] where the repository is not on this disk.

        Scripts ask for them only to offer a choice.
        """
        try:
            return real_list(*args, **kwargs)
        except OSError:
            return []

    torch.hub.list = list_or_nothing
    torch.hub.load_state_dict_from_url = lambda *_, **__: OrderedDict()
    real_load = nn.Module.load_state_dict

    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights as torch does; an empty dictionary stands for weights that were not downloaded and changes nothing."""
        if not state_dict:
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return real_load(self, state_dict, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    return {
        "transformers.modeling_utils": lambda module: _from_configuration(module, device),
        "transformers.configuration_utils": _known_configurations,
        "diffusers.models.modeling_utils": _diffusers_models,
        "timm.models._builder": _without_weights,
        "timm.models.helpers": _without_weights,
        "torchvision.datasets.mnist": _blank_digits,
        "torchvision.datasets.cifar": _blank_pictures,
        "tiktoken.registry": _encodings,
        "transformers.tokenization_utils_base": _blank_tokenizers,
        "evaluate.loading": _inert_metrics,
    }


def _from_configuration(module: Any, device: torch.device) -> None:
    """Let transformers build models from their configurations: what a step costs does not depend on the weights' values.

    ``module`` is ``transformers.modeling_utils``; models with a ``device_map`` are placed on ``device``.
    """

    def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Return a model with initial weights where ``PreTrainedModel.from_pretrained`` returns one with the hub's weights.

        ``name``: the model's on the hub, or a folder; ``args``: positional arguments of the model's class; ``config``: its
        configuration, or where to find it (None: under ``name``). Of the options of loading in ``kwargs`` only the type,
        weights of few bits, the device map and ``output_loading_info`` have an effect; that last one makes the result a
        pair (model, information). The other ``kwargs`` change the configuration, as in the original.
        """
        loading_options = {key: kwargs.pop(key) for key in _LOADING_OPTIONS if key in kwargs}
        config, kwargs = configured(cls, name, config, loading_options, kwargs)
        # Build the model in the asked type ("auto": the configuration's), then pack and place its weights as asked.
        dtype = loading_options.get("dtype") or loading_options.get("torch_dtype") or "auto"
        if dtype == "auto":
            dtype = config.dtype or torch.float32
        config.name_or_path = str(name)
        # A loaded model evaluates until it is told to train.
        model = cls._from_config(config, *args, dtype=dtype, **kwargs).eval()
        quantization = loading_options.get("quantization_config") or getattr(config, "quantization_config", None)
        for bits in (4, 8):
            if loading_options.get(f"load_in_{bits}bit") or _option(quantization, f"load_in_{bits}bit"):
                _pack_weights(model, bits, _option(quantization, "bnb_4bit_compute_dtype"), quantization)
        if loading_options.get("device_map") not in (None, "cpu", {"": "cpu"}):
            model = model.to(device)
        troubles = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        loading_info: dict[str, list[str]] = {trouble: [] for trouble in troubles}  # there are none
        return (model, loading_info) if loading_options.get("output_loading_info") else model

    def configured(
        cls: Any, name: Any, config: Any, loading_options: dict[str, Any], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return a model's configuration, changed as ``kwargs`` ask, and those of them that the model's class takes.

        ``cls``, ``name``, ``config``: as of ``from_pretrained``; ``loading_options``, ``kwargs``: its other arguments, the
        options that concern the loading and the rest.
        """
        if isinstance(config, module.PreTrainedConfig):
            config = copy.deepcopy(config)  # the script's own object stays as it is
            # The kind of attention is left among the arguments: ``_from_config`` takes it from there.
            fields = [key for key in kwargs if hasattr(config, key) and not key.startswith("attn_impl")]
            for key in fields:
                setattr(config, key, kwargs.pop(key))
            return config, kwargs
        configuration_options = {key: loading_options[key] for key in _CONFIGURATION_OPTIONS if key in loading_options}
        found: tuple[Any, dict[str, Any]] = cls.config_class.from_pretrained(
            config or name, return_unused_kwargs=True, **configuration_options, **kwargs
        )
        return found

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _option(options: Any, name: str) -> Any:
    """Return the option of a name from a dictionary or an object of options, None where it is missing."""
    return options.get(name) if isinstance(options, dict) else getattr(options, name, None)


def _pack_weights(model: Any, bits: int, dtype: Any, quantization: Any) -> None:
    """Replace a model's linear layers, except its head, by layers with weights of 4 or 8 bits, as bitsandbytes does.

    ``dtype``: the type that the layers compute in, its name, or None (see ``PackedLinear``). ``quantization``: the
    options of few-bit weights, which are set on the model, as libraries of adapters look for them there.
    """
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
    """Let transformers find the configurations of well-known models by their names, without asking the hub.

    ``module`` is ``transformers.configuration_utils``.
    """
    read_cached = module.PreTrainedConfig._get_config_dict.__func__

    def _get_config_dict(cls: Any, /, name: Any, **kwargs: Any) -> Any:
        """Return a configuration's fields, and the options among ``kwargs`` that do not concern its loading.

        The fields come from the hub's cache, or from the table of known models where the cache lacks them. Raises
        OSError, as transformers does, for a model that is in neither.
        """
        try:
            return read_cached(cls, name, **kwargs)
        except OSError:
            known_fields = _published_fields(str(name))
            if known_fields is None:
                raise
            return {**known_fields, "_name_or_path": str(name)}, {
                key: value for key, value in kwargs.items() if key not in _CONFIGURATION_OPTIONS and key[0] != "_"
            }

    module.PreTrainedConfig._get_config_dict = classmethod(_get_config_dict)


def _published_fields(name: str) -> dict[str, Any] | None:
    """Return the configuration's fields of a published model of transformers, None for an unknown one.

    A copy of a model under another organisation has its fields. ``architectures`` is the class that a pretrained model of
    the type has, by transformers' own tables.
    """
    from transformers.models.auto import modeling_auto

    model = find_model(name) or find_model(name.rpartition("/")[2])
    if model is None:
        return None
    tables = (vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"] for task in _PRETRAINED)
    classes = next((table[model.model_type] for table in tables if model.model_type in table), ())
    class_names = [classes] if isinstance(classes, str) else list(classes)  # some types have several; the first is used
    dtype = {} if model.dtype is None else {"dtype": model.dtype}
    return {"model_type": model.model_type, "architectures": class_names[:1], **model.fields, **dtype}


_PRETRAINED = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"),
    *("IMAGE_CLASSIFICATION", "CTC"),
)
"""Tasks by which published models are pretrained: a type's class is that of the first that has one for it."""


def _diffusers_models(module: Any) -> None:
    """Let diffusers' models be built from their configurations; ``module``: ``diffusers.models.modeling_utils``."""

    def from_pretrained(cls: Any, /, name: Any, **kwargs: Any) -> Any:
        """Return a model with initial weights, in ``torch_dtype`` or float32, as ``ModelMixin.from_pretrained`` would."""
        loading_options = {key: kwargs.pop(key) for key in _LOADING_OPTIONS if key in kwargs}
        configuration_options = {key: loading_options[key] for key in _CONFIGURATION_OPTIONS if key in loading_options}
        config, kwargs = cls.load_config(name, return_unused_kwargs=True, **configuration_options, **kwargs)
        model = cls.from_config(config, **kwargs).eval()
        return model.to(loading_options.get("torch_dtype") or torch.float32)

    module.ModelMixin.from_pretrained = classmethod(from_pretrained)


def _without_weights(module: Any) -> None:
    """Let timm's models keep their initial weights; ``module``: the module of timm that loads trained weights."""
    module.load_pretrained = lambda *_, **__: None


def _blank_digits(module: Any) -> None:
    """Let MNIST, and the data sets that derive from it, have blank images where their files are missing.

    ``module`` is ``torchvision.datasets.mnist``.
    """
    import numpy as np

    def fill(dataset: Any) -> None:
        """Give a data set black images, (samples, 28, 28), and labels that run through the ten classes.

        :func:`_blank` calls it with each new data set whose files are missing and which the script asks to download.
        """
        samples = _DIGIT_SAMPLES["train" if dataset.train else "test"]
        dataset.data = torch.from_numpy(np.zeros((samples, 28, 28), dtype=np.uint8))
        dataset.targets = torch.from_numpy(np.arange(samples) % 10)

    _blank(module.MNIST, fill)


def _blank_pictures(module: Any) -> None:
    """Fill CIFAR-10 and CIFAR-100 with blank images where their files are missing.

    ``module`` is ``torchvision.datasets.cifar``.
    """
    import numpy as np

    def fill(dataset: Any) -> None:
        """Give a data set black images, labels that run through its classes, and names of the classes."""
        classes = 100 if issubclass(type(dataset), module.CIFAR100) else 10
        samples = _PICTURE_SAMPLES["train" if dataset.train else "test"]
        dataset.data = np.zeros((samples, 32, 32, 3), dtype=np.uint8)
        dataset.targets = [sample % classes for sample in range(samples)]
        dataset.classes = [f"class {number}" for number in range(classes)]
        dataset.class_to_idx = {name: number for number, name in enumerate(dataset.classes)}

    _blank(module.CIFAR10, fill)


def _blank(dataset_type: Any, fill: Callable[[Any], None]) -> None:
    """Let instances of a data set's class be filled by ``fill`` where the script would download their files.

    ``fill`` is called with the new data set, which has torchvision's attributes of every data set (``root``, ``train``).
    """
    real_init = dataset_type.__init__
    blank_roots: set[str] = set()  # folders for which the script has asked to download

    def init_or_fill(self: Any, root: Any, train: bool = True, transform: Any = None, target_transform: Any = None,
             download: bool = False, **_: Any) -> None:  # fmt: skip
        """Read the data set's files from the folder ``root``, or fill it with blank samples.

        The arguments are those of torchvision's data sets. It is filled where the files are missing and the script asks to
        download them, in this call or in an earlier one for the same ``root``. Raises torchvision's RuntimeError where it
        never asked.
        """
        try:
            real_init(self, root, train, transform, target_transform, download=False)
        except RuntimeError:
            if not download and str(root) not in blank_roots:
                raise
            blank_roots.add(str(root))  # scripts often ask for the download of one half (train or test) only
            fill(self)

    dataset_type.__init__ = init_or_fill


def _inert_metrics(module: Any) -> None:
    """Let ``evaluate.load`` return an inert object for a metric that is not on this disk: metrics are no part of a step."""
    real_load = module.load

    def load_or_inert(path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the metric, or an object that takes any call and does nothing where it cannot be loaded."""
        try:
            return real_load(path, *args, **kwargs)
        except (OSError, ImportError):
            return Inert(f"evaluate.load({path!r})")

    module.load = load_or_inert


def _blank_tokenizers(module: Any) -> None:
    """Let transformers return a stand-in for the tokenizer of a well-known model that is not on this disk.

    The stand-in splits words into pieces of up to three letters. ``module`` is ``transformers.tokenization_utils_base``.
    """
    load_cached = module.PreTrainedTokenizerBase.from_pretrained.__func__

    def from_pretrained(cls: Any, /, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tokenizer from the hub's cache, or the stand-in for a model of a known family.

        Raises OSError, as transformers does, where the cache lacks the tokenizer and the family is not known.
        """
        known_fields = _published_fields(str(name))
        try:
            tokenizer = load_cached(cls, name, *args, **kwargs)
        except OSError:
            if known_fields is None:
                raise
            return _tokenizer_of_pieces(str(name), known_fields)
        # Some classes load without a vocabulary and raise nothing.
        if known_fields is None or len(tokenizer) >= _LEAST_TOKENS:
            return tokenizer
        return _tokenizer_of_pieces(str(name), known_fields)

    module.PreTrainedTokenizerBase.from_pretrained = classmethod(from_pretrained)


_LEAST_TOKENS = 1000
"""A tokenizer with fewer tokens was loaded without its vocabulary."""


def _tokenizer_of_pieces(name: str, known_fields: dict[str, Any]) -> Any:
    """Return a tokenizer that splits words into pieces of up to three letters, about as many as real tokenizers make.

    ``known_fields``: the fields of the model's configuration, whose ``model_type`` decides the special tokens and the
    longest input.
    """
    from itertools import product
    from string import ascii_lowercase

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    model_type = known_fields["model_type"]
    is_encoder = model_type in ("bert", "distilbert", "roberta")
    special = _special_tokens(model_type, is_encoder)
    letters = [chr(code) for code in range(33, 127)]  # the printable characters of ASCII
    syllables = ["".join(pair) for length in (2, 3) for pair in product(ascii_lowercase, repeat=length)]
    words = dict.fromkeys([*special.values(), *letters, *syllables])
    token_of = {word: token for token, word in enumerate(words)}
    split = Tokenizer(models.WordPiece(token_of, unk_token=special["unk_token"], continuing_subword_prefix=""))
    split.normalizer = normalizers.Lowercase()
    split.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if is_encoder:
        split.post_processor = processors.BertProcessing(("[SEP]", token_of["[SEP]"]), ("[CLS]", token_of["[CLS]"]))
    longest_input = {"bert": 512, "distilbert": 512, "roberta": 512, "gpt2": 1024}.get(model_type, 2048)  # in tokens
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, model_max_length=longest_input, **special)
    tokenizer.name_or_path = name
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
    )
    return tokenizer


def _special_tokens(model_type: str, is_encoder: bool) -> dict[str, str]:
    """Return a model's special tokens by the names of the tokenizer's arguments (``pad_token``).

    Decoders without a token for padding lack one here, too: scripts set it themselves, or fail as they would in a run.
    """
    if is_encoder:
        return {
            "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
        }  # fmt: skip
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return tokens if model_type in ("gpt2", "llama", "mistral") else tokens | {"pad_token": "<pad>"}


_VOCABULARIES = {
    "gpt2": 50_257,
    "r50k_base": 50_257,
    "p50k_base": 50_281,
    "cl100k_base": 100_277,
    "o200k_base": 200_019,
}
"""Tokens of each encoding, the one that ends a text among them."""


def _encodings(module: Any) -> None:
    """Let tiktoken return a stand-in for an encoding that is not in its cache: one token a byte, a true vocabulary size.

    ``module`` is ``tiktoken.registry``.
    """
    get_cached = module.get_encoding

    def get_encoding(name: str) -> Any:
        """Return the cached encoding, or one that splits text into bytes and whose other tokens never occur in a text.

        Raises what tiktoken raises where the encoding is neither cached nor among the known ones.
        """
        try:
            return get_cached(name)
        except Exception:  # without a network it raises whatever the library of the download raises
            if name not in _VOCABULARIES:
                raise
        import tiktoken  # type: ignore[import-not-found]

        tokens = _VOCABULARIES[name]
        ranks = {bytes([byte]): byte for byte in range(256)}
        # The byte 255 is in no text, so these tokens only fill the vocabulary.
        ranks |= {b"\xff" + token.to_bytes(3, "big"): token for token in range(256, tokens - 1)}
        end = {"<|endoftext|>": tokens - 1}
        return tiktoken.Encoding(
            name, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end, explicit_n_vocab=tokens
        )

    module.get_encoding = get_encoding
