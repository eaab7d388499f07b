"""Exact, fast context-parallel attention for Megatron.

Importing this package imports neither torch nor Megatron; a public name loads what it needs when
it is first used.
"""

from __future__ import annotations

import importlib

__all__ = ["DistFlashConfig", "dist_flash_attention"]

# Public name -> the module that defines it.
_HOMES = {
    "DistFlashConfig": "megatron_distflash.config",
    "dist_flash_attention": "megatron_distflash.runtime.attention",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
