"""The options of megatron-distflash, defined once: the dataclass, the flags and their help texts.

No torch here: command lines are read before anything heavy is imported.
"""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, field, fields
from typing import Any

FLAG_PREFIX = "--distflash-"
NO_FLAG_PREFIX = "--no-distflash-"
ENABLE_FLAG = "--distflash-attn"
GROUP_TITLE = "distflash attention"


class OptionError(ValueError):
    """Options that are wrong, or do not go with the settings beside them."""


def _option(default: str, choices: tuple[str, ...], text: str) -> Any:
    """A dataclass field that is also a flag; ``text`` is the flag's help."""
    return field(default=default, metadata={"choices": choices, "help": text})


def _switch(default: bool, text: str) -> Any:
    """A dataclass field whose flag turns it from its default; ``text`` is that flag's help."""
    return field(default=default, metadata={"choices": (False, True), "help": text})


def _seconds(default: float, text: str) -> Any:
    """A dataclass field that is also a flag with a positive number of seconds."""
    return field(default=default, metadata={"choices": None, "help": text})


@dataclass(frozen=True, slots=True)
class DistFlashConfig:
    """How context-parallel attention runs. Every field is a flag: ``--distflash-<field>``, or
    ``--no-distflash-<field>`` for what is on by default.

    Raises:
        OptionError: a field has a value that is not among its choices, or two do not go together.
    """

    schedule: str = _option(
        "balanced",
        ("auto", "balanced", "paper", "ring", "zigzag"),
        "How attention's work is spread over the context-parallel ranks. balanced: ranks that are "
        "done early help those with much left, no rank idles; paper: DISTFLASHATTN's Algorithm 2; "
        "ring: no helping; zigzag: stock Megatron's layout of two chunks per rank. All but zigzag "
        "keep the tokens of a sequence in rank order. auto: balanced, or zigzag or ring where they "
        "are faster by the cost model because few KV heads are sent over slow links between nodes.",
    )
    kernel: str = _option(
        "auto",
        ("auto", "cpu", "cuda", "cudnn", "flash", "fa4"),
        "What computes one block of attention. auto: what was measured as the fastest that "
        "supports the case; cuda: our own kernels for Hopper GPUs; cudnn and flash: PyTorch's own "
        "CUDA kernels; fa4: flash-attn-4, if it is installed; cpu: PyTorch's kernel for the CPU.",
    )
    remat: bool = _switch(
        True,
        "Let activation recomputation (--recompute-granularity full) run attention again, as stock "
        "Megatron does. By default attention's outputs are kept, and its forward runs once.",
    )
    offload: bool = _switch(
        False,
        "Hold the outputs that are kept through recomputation in pinned host memory. Needs a GPU "
        "and --recompute-granularity full.",
    )

    comm: str = _option(
        "auto",
        ("auto", "nccl", "copy", "torch"),
        "What carries keys, values and results between ranks. nccl: our own NCCL communicator on a "
        "stream of its own; copy: copy engines, which take no multiprocessors from attention, "
        "between GPUs that can map each other's memory; torch: torch.distributed. auto: copy where "
        "each rank has a GPU of its own in one node and a trial of it goes well, nccl elsewhere, "
        "torch on the CPU.",
    )
    timeout: float = _seconds(
        600.0,
        "Seconds that transfers may take before all ranks stop with an error (nccl and copy).",
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices is None:
                if not value > 0:
                    raise OptionError(f"{option.name} must be more than 0 seconds, got {value!r}.")
            elif value not in choices:
                raise OptionError(
                    f"{option.name} must be one of {', '.join(map(str, choices))}, got {value!r}."
                )
        if self.offload and not self.remat:
            raise OptionError(
                "--distflash-offload holds what --no-distflash-remat does not keep: leave one of "
                "them out."
            )

    @property
    def contiguous(self) -> bool:
        """Whether rank r holds one chunk of the sequence, in rank order (zigzag: two chunks)."""
        return self.schedule != "zigzag"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--distflash-attn`` and one flag per option as one group; returns the parser.

    The options default to None on the command line, so that a flag given without
    ``--distflash-attn`` can be told from one left out.
    """
    group = parser.add_argument_group(title=GROUP_TITLE)
    group.add_argument(
        ENABLE_FLAG,
        action="store_true",
        help="Compute attention with DistFlashAttention over the context-parallel group "
        "(--context-parallel-size) instead of the stock core attention.",
    )
    for option in fields(DistFlashConfig):
        text = option.metadata["help"]
        if isinstance(option.default, bool):
            group.add_argument(
                _flag(option),
                dest=_destination(option.name),
                action="store_const",
                const=not option.default,
                help=text,
            )
        else:
            group.add_argument(
                _flag(option),
                choices=option.metadata["choices"],
                type=type(option.default),
                metavar="SECONDS" if option.metadata["choices"] is None else None,
                default=None,
                help=f"{text} Default: {option.default}.",
            )
    return parser


def from_args(args: argparse.Namespace) -> DistFlashConfig | None:
    """The config that parsed arguments ask for; None without ``--distflash-attn``.

    Raises:
        OptionError: an option is given without ``--distflash-attn``.
    """
    values = {o: getattr(args, _destination(o.name), None) for o in fields(DistFlashConfig)}
    given = {option: value for option, value in values.items() if value is not None}
    if getattr(args, _destination("attn"), False):
        return DistFlashConfig(**{option.name: value for option, value in given.items()})
    if given:
        flag = _flag(next(iter(given)))
        raise OptionError(f"{flag} does nothing by itself: add {ENABLE_FLAG} or leave it out.")
    return None


def write_back(args: argparse.Namespace, config: DistFlashConfig) -> None:
    """Put the options in force into the arguments, where logs and checkpoints record them."""
    for option in fields(config):
        setattr(args, _destination(option.name), getattr(config, option.name))


def from_argv(argv: list[str]) -> DistFlashConfig | None:
    """The config that a command line asks for, before its own parser has seen it.

    Flags of others are ignored; errors are argparse's own (usage on stderr, exit status 2).
    """
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    args, _ = parser.parse_known_args(argv)
    try:
        return from_args(args)
    except OptionError as error:
        parser.error(str(error))


def _flag(option: Field) -> str:
    prefix = NO_FLAG_PREFIX if option.default is True else FLAG_PREFIX
    return prefix + option.name.replace("_", "-")


def _destination(name: str) -> str:
    """The attribute argparse stores an option's flag in."""
    return f"distflash_{name}"
