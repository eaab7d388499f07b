"""Megatron's compiled dataset helpers, which training builds with ``make`` at every start."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

from megatron_distflash.mcore.patching import Patches


def build_only_where_missing() -> None:
    """Skip ``make`` where the helpers can be imported: the wheel ships them without a Makefile, so
    that ``make`` would end the run.

    A checkout still compiles its own, for which its Makefile asks the ``python3`` on PATH: let that
    be the running interpreter, which has pybind11, even when its environment was not activated.
    """
    from megatron.core.datasets import utils

    stock = utils.compile_helpers

    @functools.wraps(stock)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            bin_dir = os.path.dirname(sys.executable)
            os.environ["PATH"] = os.pathsep.join([bin_dir, os.environ.get("PATH", os.defpath)])
            stock()

    Patches().replace(stock, compile_helpers)
