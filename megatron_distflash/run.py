"""Launcher: run an unmodified Megatron training script with ``--distflash-attn`` known to it.

    torchrun --nproc-per-node 8 -m megatron_distflash.run pretrain_gpt.py --distflash-attn ...

``distflash-run`` is the same as a command (``torchrun --no-python distflash-run ...``).
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from megatron_distflash import config


def main(argv: list[str] | None = None) -> None:
    """Prepare Megatron, then run the script as ``__main__`` in this process.

    Args:
        argv: script and its arguments; None means this process's command line.

    Raises:
        SystemExit: wrong usage (status 2), or whatever the script exits with.
    """
    command = _parser().parse_args(argv)
    script = Path(command.script)
    if not script.is_file():
        _parser().error(f"there is no script {command.script}: give the path of a Python file")
    options = config.from_argv(command.arguments)
    # As ``python SCRIPT`` does it. First of all, so that a script inside a Megatron-LM checkout
    # gets that checkout's Megatron and not the installed one; nothing of Megatron is loaded yet.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [command.script, *command.arguments]
    try:
        _prepare_megatron(options)
        runpy.run_path(command.script, run_name="__main__")
    except config.OptionError as error:  # says all there is to say, as wrong usage does
        _parser().error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distflash-run",
        description="Run a Megatron training script, unmodified, with --distflash-attn. "
        "On a machine without a GPU it runs on CPU ranks.",
        epilog="The script's own --help lists the --distflash-* flags among its own. Start several "
        "ranks with: torchrun --nproc-per-node N -m megatron_distflash.run SCRIPT.py ...",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, passed on"
    )
    return parser


def _prepare_megatron(options: config.DistFlashConfig | None) -> None:
    """Everything that must be in place before the script imports Megatron's functions by name."""
    from megatron_distflash.mcore import cpu
    from megatron_distflash.mcore.dataset_helpers import build_only_where_missing

    if cpu.needed():
        cpu.enable()
    else:
        build_only_where_missing()
    from megatron_distflash.mcore.arguments import register_arguments
    from megatron_distflash.mcore.install import install
    from megatron_distflash.mcore.settle import settle_on_command_line

    register_arguments()
    if options is not None:
        install(settle_on_command_line(sys.argv[1:], options))


if __name__ == "__main__":
    main()
