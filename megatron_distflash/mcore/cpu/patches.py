"""The places in Megatron itself that need a GPU or a package that a CPU machine lacks.

Each function patches one place and says why. They import Megatron, from wherever the caller's
``sys.path`` finds it: the wheel or a Megatron-LM checkout.
"""

from __future__ import annotations

import copy
import functools
import queue
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_distflash.mcore.cpu.arguments import add_cpu_defaults, check_cpu_args
from megatron_distflash.mcore.cpu.rng import use_own_generator
from megatron_distflash.mcore.dataset_helpers import build_only_where_missing


def install_patches() -> None:
    """Import Megatron and patch it for CPU ranks."""
    import megatron.training  # noqa: F401  (loads the modules that import by name)

    _patch_arguments()
    _patch_initialize_megatron()
    _patch_jit_warmup()
    build_only_where_missing()
    _patch_data_loader()
    _patch_torch_norm()
    _patch_distributed_optimizer()
    _patch_checkpoint_queue()
    _patch_moe_splits()


def _replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replace a function in every loaded Megatron module that holds it, by-name imports too."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "megatron" or module_name.startswith("megatron."):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, replacement)


def _patch_arguments() -> None:
    """``parse_args`` is where every script's arguments pass, after its own provider has added its
    own: CPU defaults go onto that parser. ``validate_args`` comes later, when a checkpoint's
    arguments are in as well: that is when to refuse."""
    from megatron.training import arguments

    stock_parse = arguments.parse_args
    stock_validate = arguments.validate_args

    @functools.wraps(stock_parse)
    def parse_args(
        extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Namespace:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_cpu_defaults(parser)

        return stock_parse(provider, *args, **kwargs)

    @functools.wraps(stock_validate)
    def validate_args(args: Namespace, *more: Any, **kwargs: Any) -> Any:
        check_cpu_args(args)
        return stock_validate(args, *more, **kwargs)

    _replace_everywhere(stock_parse, parse_args)
    _replace_everywhere(stock_validate, validate_args)


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


def _patch_distributed_optimizer() -> None:
    """Without apex or Transformer Engine the distributed optimizer runs torch's AdamW, which it
    cannot resume: torch counts steps in a tensor per parameter. Megatron asks for the counts before
    there are any, takes them for state to be sharded like the moments, and after loading gives all
    parameters one tensor to count in. What is saved stays as on a GPU: the count of each group.

    It also copies loaded values into parameters outside ``no_grad``, which fp32 parameters refuse.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock_state_dict = DistributedOptimizer.state_dict
    stock_load_state_dict = DistributedOptimizer.load_state_dict
    stock_get_states = DistributedOptimizer._get_main_param_and_optimizer_states
    stock_set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(stock_state_dict)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            if not self.optimizer.state:
                self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))
        return stock_state_dict(self)

    @functools.wraps(stock_load_state_dict)
    def load_state_dict(self: DistributedOptimizer, loaded: dict[str, Any]) -> None:
        stock_load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    @functools.wraps(stock_get_states)
    def get_states(self: DistributedOptimizer, model_param: torch.Tensor) -> dict[str, Any]:
        states = stock_get_states(self, model_param)
        states.pop("step", None)
        return states

    @functools.wraps(stock_set_states)
    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        with torch.no_grad():
            stock_set_states(self, model_param, {"step": None, **tensors})  # None: leave it.

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._get_main_param_and_optimizer_states = get_states
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _patch_checkpoint_queue() -> None:
    """To save, every rank starts another Python process that imports torch, only to hold the queue
    on which the rank hands the result to itself: seconds and 0.5 GB per rank where all ranks share
    one machine. Saves are synchronous here (``--async-save`` is refused), so a plain queue will do.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    stock = filesystem_async.get_write_results_queue

    @functools.wraps(stock)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> queue.Queue[Any]:
        return queue.Queue()  # Its one reader is the writer that asked for it.

    _replace_everywhere(stock, get_write_results_queue)


def _patch_moe_splits() -> None:
    """The all-to-all dispatcher of MoE layers turns its split sizes from tensors into numbers only
    where they are on a GPU; torch's all_to_all_single takes nothing but numbers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: F401  (by name)

    stock = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(stock)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace_everywhere(stock, maybe_move_tensor_to_cpu)
