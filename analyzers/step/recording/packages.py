"""Packages that a script needs and that are not installed here: what stands in for them while it is recorded.

A script that fails for want of a package is run once more with a stand-in for it (:func:`missing` says which). Packages
of :mod:`kernels <ddltool.analyzers.step.recording.kernels>` have the arithmetic of theirs; any other is inert: it takes
whatever is asked of it and does nothing, as a log or a tracker does for a step. What needs more of it fails still.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ABSENT = "not installed: "
"""Marks a key of a recording's assumptions that is a package which was stood in for, and no place in a file."""
NOTE = "note: "
"""Marks a key of them that is a remark in words."""
FAILURE_MARK = "\0"
"""The process of a recorded script writes this byte before the line in which it says why it recorded nothing."""
REST = "*"
"""Among the names that a package holds: whatever else is asked of it is inert."""
_VERSION = "99.0"
"""The version of every stand-in: scripts ask for at least some version."""
# Packages that other libraries miss with an error of their own, by a pattern that its text matches.
_ERROR_PATTERNS = {
    "flash_attn": r"flash[ _-]?attn|flash[ _-]?attention",
    "bitsandbytes": r"bitsandbytes",
    "liger_kernel": r"liger[ _-]kernel",
    "xformers": r"xformers",
    "apex": r"\bapex\b",
    "tensorboard": r"\btensorboard\b",
}
INSTEAD = {
    "deepspeed": "record it with FSDP2 or DistributedDataParallel in its place",
    "transformer_engine": "record it in bfloat16 with torch's own layers",
    "torchao": "record it in bfloat16",
    "megatron": "record it with torch's tensor parallelism",
    "hydra": "pip install hydra-core",
}
"""What to do without packages whose work a step needs and nothing here does."""
# A package's name in the text of an ImportError.
_NAMED = re.compile(r"(?:pip install |No module named |[`'\"])[`'\"]?([A-Za-z][\w.-]*)")


class Inert:
    """Anything in an inert package: it can be called, entered, subclassed and asked for any attribute, but not computed with.

    ``name``: its dotted name in the package, as which it is printed.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the argument if it is a single function or class, as a decorator would; otherwise an inert object."""
        if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, type)):
            return args[0]
        return Inert(f"{self._name}()")

    def __getattr__(self, name: str) -> Any:
        """Return an inert attribute. Raises AttributeError for special names, which Python's protocols look for."""
        if name.startswith("__") or name == "_name":
            raise AttributeError(name)
        return Inert(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Inert:
        """Return an inert object for any key."""
        return Inert(f"{self._name}[...]")

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over nothing: the object is an empty collection."""
        return iter(())

    def __len__(self) -> int:
        """Return 0: the object is an empty collection."""
        return 0

    def __contains__(self, _: object) -> bool:
        """Return False: the object is an empty collection."""
        return False

    def __enter__(self) -> Inert:
        """Return the object itself, as what ``with ... as`` names."""
        return self

    def __exit__(self, *_: object) -> None:
        """Return None, so that an error in the block is raised on."""

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        """Return no bases: a class that is derived from this object derives from ``object`` alone."""
        return ()

    def __instancecheck__(self, _: object) -> bool:
        """Return False: nothing is an instance of an inert class."""
        return False

    def __or__(self, _: Any) -> Inert:
        """Return the object itself: annotations such as ``Run | None`` are computed when a script is read."""
        return self

    __ror__ = __or__

    def __format__(self, _: str) -> str:
        """Return the name for any format, also for one that only numbers take, such as ``.3f``."""
        return self._name

    def __str__(self) -> str:
        return self._name


class _Package(ModuleType):
    """A module that is stood in for."""

    def __init__(self, name: str, known: Mapping[str, Any] | None) -> None:
        """Begin a package without files.

        ``known``: what it holds, by dotted names that begin with the package's; None for an inert one.
        """
        super().__init__(name)
        self._known = known
        self.__path__: list[str] = []  # what has a path may have submodules
        self.__version__ = _VERSION

    def __getattr__(self, name: str) -> Any:
        """Return what the package has under a name: a known object, an inert one, or a submodule, which is imported.

        Inert packages, and those that hold ``REST``, have an inert object for every unknown name. Raises AttributeError
        for special names, and for a name that any other package does not know.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        dotted_name = f"{self.__name__}.{name}"
        if self._known is not None and dotted_name in self._known:
            return self._known[dotted_name]
        if self._known is None or REST in self._known:
            return Inert(dotted_name)
        if any(key.startswith(f"{dotted_name}.") for key in self._known):
            return importlib.import_module(dotted_name)
        raise AttributeError(f"{dotted_name} has no stand-in here")


class _Distribution(Distribution):
    """The metadata by which a stood-in package counts as installed (``importlib.metadata``)."""

    def __init__(self, name: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {_VERSION}\n"

    def read_text(self, filename: str) -> str | None:
        """Return the text of the file METADATA, None for any other file."""
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Return the path itself, where nothing is: a stand-in has no files."""
        return Path(path)


class _StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for packages of some names; it is asked last, so that an installed package comes first."""

    def __init__(
        self, names: Sequence[str], known: Mapping[str, Mapping[str, Any]], used: Callable[[str], None]
    ) -> None:
        """Stand in for packages of these names.

        ``known``: by a package's name, what it holds (see :class:`_Package`); a package that is missing from it is
        inert. ``used`` is called with the package's name whenever it or one of its modules is imported.
        """
        self._names, self._known, self._used = tuple(names), known, used

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec by which Python makes the module ``fullname`` of a stood-in package, None for one of any other package.

        ``path`` and ``target`` are not used.
        """
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in for a package or submodule.

        Raises ImportError for a submodule of a package of which it is known what it holds, if it holds no such submodule.
        """
        # The dots keep "apex" from being found in "apexes".
        package = next(name for name in self._names if f"{spec.name}.".startswith(f"{name}."))
        self._used(package)
        known = self._known.get(spec.name.partition(".")[0])  # None: the package is inert
        if known is not None and REST not in known:
            holds_module = any(key.startswith(f"{spec.name}.") for key in known)
            if not holds_module:
                raise ImportError(f"{spec.name} has no stand-in here", name=spec.name)
        return _Package(spec.name, known)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the stand-in is complete."""

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Any:  # noqa: B008
        """Yield the metadata of a stood-in package that is asked for by name."""
        asked_for = (context.name or "").replace("-", "_").lower()
        if any(asked_for == name.lower() for name in self._names):
            yield _Distribution(asked_for)


def stand_in_packages(
    names: Sequence[str], packages: Mapping[str, Callable[[], Mapping[str, Any]]], used: Callable[[str], None]
) -> None:
    """Let imports in this process find stand-ins for packages of these names.

    ``packages``: by name, a function that returns what the package holds; packages that are missing from it are inert: they
    take whatever is asked of them and do nothing. ``used`` is called with the package's name whenever it or one of its
    modules is imported.
    """
    if names:
        stand_ins = {name: packages[name]() for name in names if name in packages}
        sys.meta_path.append(_StandIns(names, stand_ins, used))


def missing(error: BaseException) -> list[str]:
    """Return the packages whose absence made a script fail, [] if it failed for another reason.

    They are found in the texts of the error and of the errors that it came from. If there are any, absent packages
    that the files of the traceback import at their top are added, so that the script need not fail once for each.
    """
    packages: dict[str, None] = {}  # as an ordered set
    chain: list[BaseException] = [error]
    while chain:
        raised = chain.pop()
        earlier = (raised.__cause__, raised.__context__)
        chain += [other for other in earlier if other is not None and other is not raised]
        packages |= dict.fromkeys(_missing_by(raised))
    if packages:
        packages |= dict.fromkeys(_needed_beside(error))
    return list(packages)


def _missing_by(error: BaseException) -> list[str]:
    """Return the absent packages that one error names, without the errors that it came from."""
    text = str(error)
    packages: list[str] = []
    if isinstance(error, ModuleNotFoundError) and error.name:
        names = [error.name]
    elif isinstance(error, ImportError) and not text.startswith("cannot import name"):
        names = _NAMED.findall(text)
    else:  # "cannot import name" is said of an installed module of another version, which is not missing
        names = []
    packages += filter(None, map(_absent, names))
    if isinstance(error, (ImportError, ValueError, RuntimeError, SystemExit)) and "install" in text.lower():
        mentioned = [name for name, words in _ERROR_PATTERNS.items() if re.search(words, text, re.IGNORECASE)]
        packages += [name for name in mentioned if _absent(name)]
    return packages


def _absent(name: str) -> str | None:
    """Return the package of a module if that package is not installed; None if it is, or if ``name`` is no module's name.

    The package is the first part of the module's name, or the first two parts where the first is an installed namespace
    package, a folder that several packages share (``google``).
    """
    parts = name.replace("-", "_").split(".")
    for length in range(1, min(len(parts), 2) + 1):
        package = ".".join(parts[:length])
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return package if all(part.isidentifier() for part in parts[:length]) else None
        is_namespace = spec.origin is None
        if not is_namespace:
            return None  # installed; what it lacks is a matter of versions
    return None


def _needed_beside(error: BaseException) -> list[str]:
    """Return absent packages that the files of an error's traceback import at their top: what would fail next."""
    files: set[str] = set()
    entry = error.__traceback__
    while entry is not None:
        files.add(entry.tb_frame.f_code.co_filename)
        entry = entry.tb_next
    return needed_by(files)


def needed_by(files: Iterable[str]) -> list[str]:
    """Return absent packages that Python files import at their top, outside of any ``try``.

    Files of installed libraries, and files that cannot be read or parsed, are passed over.
    """
    names: list[str] = []
    for file in files:
        if "site-packages" in file or not file.endswith(".py"):
            continue
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            for statement in ast.parse(Path(file).read_text()).body:
                if isinstance(statement, ast.Import):
                    names += [alias.name for alias in statement.names]
                elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                    names.append(statement.module)
    absent_packages = filter(None, map(_absent, names))
    return list(dict.fromkeys(absent_packages))  # each once, in order
