"""Megatron's command line with our flags: one group in ``--help``, checked before training.

``register_arguments`` hooks into Megatron's own parsing, so scripts need not know; whoever parses
by other means calls ``config.add_flags`` and ``install`` with ``config.from_args``.
"""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from megatron_distflash import config
from megatron_distflash.config import DistFlashConfig, OptionError
from megatron_distflash.mcore.install import install
from megatron_distflash.mcore.patching import Patches
from megatron_distflash.mcore.settle import settle_schedule
from megatron_distflash.mcore.support import check_arguments

_registration: Patches | None = None


def register_arguments() -> None:
    """Let Megatron's parser know our flags; again: nothing.

    ``--distflash-attn`` on the command line then installs DistFlashAttention while arguments are
    parsed, and a combination that is not supported ends the script with an OptionError.
    """
    global _registration
    if _registration is not None:
        return
    from megatron.training import arguments

    _registration = Patches()
    _registration.replace(arguments.parse_args, _parse_args(arguments.parse_args))
    _registration.replace(arguments.validate_args, _validate_args(arguments.validate_args))


def unregister_arguments() -> None:
    """Give Megatron's parser back as it was."""
    global _registration
    if _registration is not None:
        _registration.undo()
        _registration = None


def _parse_args(stock: Callable[..., Namespace]) -> Callable[..., Namespace]:
    @functools.wraps(stock)
    def parse_args(
        extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Namespace:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return _repair_help(config.add_flags(parser))

        parsed = stock(provider, *args, **kwargs)
        _check_kept(parsed)
        options = config.from_args(parsed)
        if options is not None:
            options = settle_schedule(parsed, options)
            # Otherwise many are still to come from the checkpoint; validation checks them then.
            if not getattr(parsed, "use_checkpoint_args", False):
                check_arguments(parsed, options)
            _adapt(parsed, options)
            install(options)
        return parsed

    return parse_args


def _repair_help(parser: ArgumentParser) -> ArgumentParser:
    """Escape the percent signs that some Megatron help texts forget to, and that end ``--help`` in
    an error before our group is shown."""
    formatter = parser._get_formatter()
    for action in filter(lambda action: action.help, parser._actions):
        try:
            formatter._expand_help(action)
        except (TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    return parser


def _check_kept(args: Namespace) -> None:
    """``--yaml-cfg`` replaces all parsed arguments by a file's, ours too."""
    if not hasattr(args, "distflash_attn") and config.from_argv(sys.argv[1:]) is not None:
        raise OptionError(
            "--yaml-cfg replaces the command line, so --distflash-attn would be lost: pass the "
            "settings as flags."
        )


def _adapt(args: Namespace, options: DistFlashConfig) -> None:
    """Settings that follow from ``--distflash-attn``."""
    config.write_back(args, options)
    # The mask is s × s values per micro-batch, and nothing reads it.
    args.create_attention_mask_in_dataloader = False


def _validate_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint arguments are merged between parsing and validation, so check once more."""

    @functools.wraps(stock)
    def validate_args(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        options = config.from_args(args)
        if options is None:
            return stock(args, *rest, **kwargs)
        check_arguments(args, options)
        if options.contiguous and args.seq_length is not None:
            return _validate_any_length(stock, args, *rest, **kwargs)
        return stock(args, *rest, **kwargs)

    return validate_args


def _validate_any_length(
    stock: Callable[..., Any], args: Namespace, *rest: Any, **kwargs: Any
) -> Any:
    """Validate without stock's demand for a multiple of 2 · cp, which only zigzag has.

    The demand is an assert amid a long function, on ``args.seq_length``. The length is therefore an
    int that says yes to that one question, and an ordinary one again afterwards. Its real
    requirements were checked before.
    """
    length, chunks = args.seq_length, 2 * args.context_parallel_size
    if length % chunks == 0:
        return stock(args, *rest, **kwargs)
    args.seq_length = _ContiguousLength(length, chunks)
    result = stock(args, *rest, **kwargs)
    for name, value in vars(args).items():
        if isinstance(value, _ContiguousLength):
            setattr(args, name, int(value))
    return result


class _ContiguousLength(int):
    """A sequence length that counts as a multiple of ``chunks``."""

    def __new__(cls, length: int, chunks: int) -> _ContiguousLength:
        self = super().__new__(cls, length)
        self.chunks = chunks
        return self

    def __mod__(self, divisor: int) -> int:
        return 0 if divisor == self.chunks else int(self) % divisor
