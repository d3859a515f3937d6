"""Libraries that are changed as the script imports them: those that download, start processes, or dropped a name.

Start at :func:`change_libraries`; the process is the recorded script's alone.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ddltool.analyzers.step.recording.cuda_graphs import stand_in_graphs
from ddltool.analyzers.step.recording.downloads import stand_in_downloads
from ddltool.analyzers.step.recording.flexible import stand_in_flexible_attention
from ddltool.analyzers.step.recording.kernels import CompiledKernel, TritonKernel
from ddltool.analyzers.step.recording.legacy import stand_in_types
from ddltool.analyzers.step.recording.pipelines import stand_in_neighbours
from ddltool.analyzers.step.recording.recorder import Recorder
from ddltool.analyzers.step.recording.synchronized import stand_in_synchronized_norms
from ddltool.analyzers.step.recording.vision import stand_in_vision


class _PatchingFinder(MetaPathFinder, Loader):
    """An import hook that loads modules of some names as Python does, and patches each right after it was run."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        """Begin with the patches to apply; ``changes``: by a module's name, the function that patches it."""
        self._changes = changes
        self._loaders: dict[str, Any] = {}
        """By a module's name, its own loader; None while Python looks for that loader."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that Python's other finders have for the module ``fullname``, with this object as its loader.

        None for a module that is not patched, and while the other finders are asked. Python's import calls this method;
        ``path`` and ``target`` are not used.
        """
        if fullname not in self._changes or fullname in self._loaders:
            return None
        self._loaders[fullname] = None  # Python asks this finder again, which then returns None above
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self._loaders[fullname] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        """Return the module that its own loader makes, still empty."""
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module by its own loader, then patch it."""
        self._loaders[module.__name__].exec_module(module)
        self._changes[module.__name__](module)


def change_libraries(recorder: Recorder, torchvision_ops: torch.library.Library | None) -> None:
    """Patch libraries as soon as the script imports them, and those that are imported already at once.

    ``torchvision_ops``: what :func:`~.vision.declare_torchvision` returned; None: torchvision's own operators are used, or
    it is missing. Also replaces parts of torch and ``subprocess.Popen``, for good.
    """
    # By a module's name, the function that patches it.
    changes = stand_in_downloads(recorder.gpu) | stand_in_vision(torchvision_ops, recorder.gpu)
    changes |= {
        "torch.distributed.pipelining.stage": lambda module: stand_in_neighbours(module, recorder),
        "torch.nn.attention.flex_attention": stand_in_flexible_attention,
        "accelerate.utils.dataclasses": _restore_tpu_member,
        "lightning.fabric.utilities.device_parser": _accept_any_device,
        "lightning_fabric.utilities.device_parser": _accept_any_device,
        "triton.runtime.autotuner": _record_triton_launches,
    }
    imported = [name for name in changes if name in sys.modules]  # a launcher's parser has imported some
    for name in imported:
        patch = changes.pop(name)
        patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder(changes))
    _start_no_ranks()
    stand_in_graphs(recorder)
    recorder.kept.append(stand_in_synchronized_norms())
    stand_in_types()
    torch.cuda._compile_kernel = CompiledKernel


def _restore_tpu_member(module: Any) -> None:
    """Give ``DistributedType`` its old member TPU, which scripts still compare with, as another name of XLA."""
    kinds = module.DistributedType
    if "TPU" not in kinds.__members__:
        type.__setattr__(kinds, "TPU", kinds.XLA)  # an Enum's own __setattr__ refuses new members


def _accept_any_device(module: Any) -> None:
    """Let Lightning accept any number of devices.

    A script that plain python starts asks for the devices of all its ranks, and the recorded process sees one.
    """
    module._sanitize_gpu_ids = lambda gpus, **_: gpus


def _record_triton_launches(module: Any) -> None:
    """Let launches of an installed Triton's kernels be recorded; no kernel is compiled, run or timed.

    ``module`` is ``triton.runtime.autotuner``, which has imported the other parts that are patched. An autotuned kernel
    takes the first of its configurations. Triton's driver is replaced by one that names the GPU that the script sees.
    """
    from triton.backends.compiler import GPUTarget

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        """Record one launch of a kernel; with ``warmup``, which asks only to compile, do nothing."""
        if not warmup:
            TritonKernel(kernel.fn).run(*args, **kwargs)

    def target() -> Any:
        """Return what Triton would compile for: the compute capability of the GPU that the script sees."""
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, 32)  # 32 threads in a warp

    module.JITFunction.run = run
    module.Autotuner._bench = lambda _self, *_, **__: 0.0
    module.driver.set_active(
        SimpleNamespace(
            get_current_target=target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_benchmarker=lambda: lambda *_, **__: 0.0,
        )
    )


class _OtherRank(subprocess.Popen[Any]):
    """A ``Popen`` that starts no process for the script itself: that would be another rank, and only rank 0 is recorded."""

    def __init__(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """Start the process; for the script itself start none, and set the process number 0, status 0 and no streams.

        The arguments are those of ``Popen``. ``nvidia-smi``, where it is missing, is replaced by a command that prints
        nothing.
        """
        words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
        script = Path(sys.argv[0]).resolve()
        # The script may follow an option of python's, such as -u.
        runs_script = words[:1] == [sys.executable] and any(Path(word).resolve() == script for word in words[1:3])
        if runs_script:
            self.args = args
            self.pid = 0  # marks another rank for the methods below
            self.returncode = 0
            self.stdin = self.stdout = self.stderr = None
            self._child_created = False
            return
        if words[:1] == ["nvidia-smi"] and shutil.which("nvidia-smi") is None:
            args = ["true"]  # scripts only log what nvidia-smi says: a command that says nothing will do
        super().__init__(args, *others, **kwargs)

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs. Another rank always seems to run."""
        return super().poll() if self.pid else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end and return its exit status. For another rank return 0 at once."""
        return super().wait(timeout) if self.pid else 0


def _start_no_ranks() -> None:
    """Replace ``subprocess.Popen`` for good, so that the script starts no other ranks."""
    setattr(subprocess, "Popen", _OtherRank)  # noqa: B010 - mypy lets no class be assigned
