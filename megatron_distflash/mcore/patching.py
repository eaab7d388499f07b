"""Reversible patches of Megatron: every change is recorded and can be taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any


class Patches:
    """Changes to Megatron that belong together; ``undo`` takes them back, newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or object that defines it itself."""
        original = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))

    def replace(self, original: FunctionType, replacement: FunctionType) -> None:
        """Replace a module's function wherever a loaded module holds it.

        ``from module import function`` copies the reference, so the defining module alone is not
        enough. Modules loaded later find the replacement in the defining module.
        """
        _swap(original, replacement)
        # Modules loaded in between hold the replacement, so undoing searches again.
        self._undo.append(lambda: _swap(replacement, original))

    def undo(self) -> None:
        """Take every change back. Doing it twice does nothing."""
        while self._undo:
            self._undo.pop()()


def _swap(old: FunctionType, new: FunctionType) -> None:
    for module, name in list(_holders(old)):
        setattr(module, name, new)


def _holders(function: FunctionType) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, attribute) that is this very function, under whatever name.

    Our own modules are left out: they define the replacements.
    """
    own = __name__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and module_name.partition(".")[0] != own:
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name
