"""The places in Megatron itself that need a GPU or a package that a CPU machine lacks.

Each function patches one place and says why. They import Megatron, from wherever the caller's
``sys.path`` finds it: the wheel or a Megatron-LM checkout.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_distflash.mcore.cpu.arguments import add_cpu_defaults, check_cpu_args
from megatron_distflash.mcore.cpu.rng import use_own_generator


def install_patches() -> None:
    """Import Megatron and patch it for CPU ranks."""
    import megatron.training  # noqa: F401  (loads the modules that import by name)

    _patch_parse_args()
    _patch_initialize_megatron()
    _patch_jit_warmup()
    _patch_compile_helpers()
    _patch_data_loader()
    _patch_torch_norm()


def _replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function in every loaded Megatron module that holds it, by-name imports too."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "megatron" or module_name.startswith("megatron."):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, replacement)


def _patch_parse_args() -> None:
    """``parse_args`` is where every script's arguments pass, after its own provider has added its
    own: CPU defaults go onto that parser, and the result is checked before Megatron validates."""
    from megatron.training import arguments

    stock = arguments.parse_args

    @functools.wraps(stock)
    def parse_args(
        extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Namespace:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_cpu_defaults(parser)

        parsed = stock(provider, *args, **kwargs)
        check_cpu_args(parsed)
        return parsed

    _replace_everywhere(stock, parse_args)


def _patch_initialize_megatron() -> None:
    """``pretrain`` calls ``initialize_megatron`` without its own ``allow_no_cuda`` switch."""
    from megatron.training import initialize

    stock = initialize.initialize_megatron

    @functools.wraps(stock)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if not args:
            kwargs["allow_no_cuda"] = True
        return stock(*args, **kwargs)

    _replace_everywhere(stock, initialize_megatron)


def _patch_jit_warmup() -> None:
    """``set_jit_fusion_options`` compiles functions early by running them on random inputs. Nothing
    is compiled here, and its draws, whose number depends on the parallel sizes, would move the
    generator that initialises the weights: TP 1 and TP 2 would train different models."""
    from megatron.training import initialize

    stock = initialize.set_jit_fusion_options

    @functools.wraps(stock)
    def set_jit_fusion_options(*args: Any, **kwargs: Any) -> None:
        return None

    _replace_everywhere(stock, set_jit_fusion_options)


def _patch_compile_helpers() -> None:
    """Training runs ``make`` for the dataset helpers, but the wheel ships them compiled and has no
    Makefile: skip it where the helper can be imported. A checkout still compiles its own, for
    which its Makefile asks the ``python3`` on PATH: let that be the running interpreter, which has
    pybind11, even when its virtual environment was not activated."""
    from megatron.core.datasets import utils

    stock = utils.compile_helpers

    @functools.wraps(stock)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            bin_dir = os.path.dirname(sys.executable)
            os.environ["PATH"] = os.pathsep.join([bin_dir, os.environ.get("PATH", os.defpath)])
            stock()

    _replace_everywhere(stock, compile_helpers)


def _patch_data_loader() -> None:
    """Megatron's loaders pin memory, which only warns here, and draw from the generator that now
    drives dropout (see ``use_own_generator``)."""
    from megatron.training.datasets import data_samplers

    stock = data_samplers.build_pretraining_data_loader

    @functools.wraps(stock)
    def build_pretraining_data_loader(*args: Any, **kwargs: Any) -> Any:
        loader = stock(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.pin_memory = False
            use_own_generator(loader)
        return loader

    _replace_everywhere(stock, build_pretraining_data_loader)


def _patch_torch_norm() -> None:
    """Without apex or Transformer Engine the norm is ``WrappedTorchNorm``, which refuses sequence
    parallelism although all it takes is to mark its parameters: Megatron then sums their gradients
    over the tensor-parallel group."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stock_new = WrappedTorchNorm.__new__

    @functools.wraps(stock_new)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return stock_new(cls, config, *args, **kwargs)
        plain_config = copy.copy(config)
        plain_config.sequence_parallel = False
        norm = stock_new(cls, plain_config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)
