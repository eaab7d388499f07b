#!/usr/bin/env python
"""Write text as a Megatron indexed dataset: PREFIX.bin (token ids) and PREFIX.idx (documents).

A document is a file, or a line of a JSON Lines file; its boundaries are kept, and an
end-of-document token closes it. Folders are walked in the order of their relative paths, so that
the same text gives the same dataset on every machine, whatever the number of workers.

Tokens are bytes unless --tokenizer-type names one of Megatron's tokenizers. Byte-level data has ids
0..255 for bytes and 256 for the end of a document; Megatron reads it with
    --tokenizer-type NullTokenizer --vocab-size 257

    python tools/preprocess_text.py --input ~/notes --output-prefix data/notes
    python tools/preprocess_text.py --input books.jsonl --output-prefix data/books --workers 8 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/llama
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

BYTES = "bytes"
BYTE_EOD_ID = 256
BYTE_VOCAB_SIZE = 257
JSON_LINES_SUFFIXES = (".jsonl", ".json")
DEFAULT_GLOBS = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl")
BAD_UTF8_POLICIES = ("replace", "skip", "fail")


@dataclass(frozen=True, slots=True)
class Source:
    """Where one document comes from: a whole file, or one line of a JSON Lines file."""

    path: Path
    line_idx: int | None = None
    line: bytes | None = None

    def __str__(self) -> str:
        return str(self.path) if self.line_idx is None else f"{self.path}:{self.line_idx + 1}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document's token ids, [num_tokens] of any integer type; empty when it is left out."""

    token_ids: np.ndarray
    num_source_bytes: int
    had_bad_utf8: bool = False


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How documents become tokens; hashable and picklable, since workers get a copy."""

    tokenizer_type: str = BYTES
    tokenizer_argv: tuple[str, ...] = ()
    json_key: str = "text"
    bad_utf8: str = "replace"
    append_eod: bool = True


@dataclass(slots=True)
class Totals:
    """What a dataset was made of."""

    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad_utf8: int = 0


# ---------------------------------------------------------------------------- documents


def find_files(inputs: Sequence[Path], globs: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """The files to read, in a fixed order: inputs as given, folders by relative path.

    Globs and excluded names apply to folders only; a file that is named is always read.
    Raises ValueError when an input does not exist or nothing matches.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += _walk(path, globs, set(exclude))
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"--input {path} does not exist")
    if not files:
        raise ValueError(
            f"no documents found: no file under {', '.join(map(str, inputs))} matches "
            f"{' '.join(globs)}; choose others with --glob"
        )
    return files


def _walk(folder: Path, globs: Sequence[str], exclude: set[str]) -> list[Path]:
    matches = {
        path
        for pattern in globs
        for path in folder.rglob(pattern)
        if path.is_file() and not exclude.intersection(path.relative_to(folder).parts)
    }
    return sorted(matches, key=lambda path: path.relative_to(folder).as_posix())


def iter_sources(files: Sequence[Path]) -> Iterator[Source]:
    """One source per document; JSON Lines files are read a line at a time, blank lines skipped."""
    for path in files:
        if path.suffix not in JSON_LINES_SUFFIXES:
            yield Source(path)
            continue
        with path.open("rb") as lines:
            for line_idx, line in enumerate(lines):
                if line.strip():
                    yield Source(path, line_idx, line)


# ---------------------------------------------------------------------------- tokens


def encode(source: Source, options: EncodeOptions) -> Encoded:
    """Read one document and turn it into tokens. Raises ValueError when it breaks the options."""
    raw = source.path.read_bytes() if source.line is None else source.line
    content = raw if source.line is None else _json_text(source, options)
    if options.tokenizer_type == BYTES:
        # Bytes need no decoding: a file's bytes are its tokens, valid UTF-8 or not.
        token_ids = np.frombuffer(content, dtype=np.uint8).astype(np.uint16)
        return Encoded(_closed(token_ids, BYTE_EOD_ID, options), len(raw))

    text, had_bad_utf8 = _decoded(source, content, options)
    tokenizer = build_tokenizer(options)
    token_ids = np.asarray(tokenizer.tokenize(text), dtype=np.int64)
    eod_id = tokenizer.eod if options.append_eod else None
    return Encoded(_closed(token_ids, eod_id, options), len(raw), had_bad_utf8)


def _json_text(source: Source, options: EncodeOptions) -> bytes:
    """The text of a JSON Lines record, as UTF-8; what is not UTF-8 stays so, for `_decoded`."""
    assert source.line is not None
    try:
        record = json.loads(source.line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise ValueError(f"{source} is not a line of JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(options.json_key), str):
        raise ValueError(
            f"{source} has no text under the key {options.json_key!r}; name another with --json-key"
        )
    return record[options.json_key].encode("utf-8", "surrogatepass")


def _decoded(source: Source, content: bytes, options: EncodeOptions) -> tuple[str, bool]:
    """(text, whether bytes were not UTF-8); a document that is to be skipped has no text."""
    try:
        return content.decode("utf-8"), False
    except UnicodeDecodeError as error:
        if options.bad_utf8 == "fail":
            raise ValueError(f"{source} is not UTF-8: {error}; see --bad-utf8") from error
        return ("" if options.bad_utf8 == "skip" else content.decode("utf-8", "replace")), True


def _closed(token_ids: np.ndarray, eod_id: int | None, options: EncodeOptions) -> np.ndarray:
    """The document with its end marked; an empty document stays empty, and so is left out."""
    if not options.append_eod or token_ids.size == 0:
        return token_ids
    return np.append(token_ids, np.asarray(eod_id, dtype=token_ids.dtype))


@functools.cache
def build_tokenizer(options: EncodeOptions):
    """Megatron's tokenizer for these options, made once per process.

    Raises ValueError when it has no end-of-document token and one is to be appended.
    """
    # Megatron takes seconds to import, and byte-level data needs none of it.
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = argparse.ArgumentParser("preprocess_text.py", allow_abbrev=False)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    args = parser.parse_args(["--tokenizer-type", options.tokenizer_type, *options.tokenizer_argv])
    args.pad_vocab_size = False  # padding is a matter of the model, not of its data
    tokenizer = build(args)
    eod_id = getattr(tokenizer, "eod", None)  # SentencePiece says -1 for a token it lacks
    if options.append_eod and (eod_id is None or eod_id < 0):
        raise ValueError(
            f"the {options.tokenizer_type} has no end-of-document token; use a tokenizer that "
            "has one, or pass --no-append-eod"
        )
    return tokenizer


def vocab_size(options: EncodeOptions) -> int:
    """Number of token ids, end of document included; it decides the width of a stored token."""
    if options.tokenizer_type == BYTES:
        return BYTE_VOCAB_SIZE
    return build_tokenizer(options).vocab_size


# ---------------------------------------------------------------------------- dataset


def encode_all(
    files: Sequence[Path], options: EncodeOptions, num_workers: int
) -> Iterator[Encoded]:
    """Every document's tokens, in the order of the sources."""
    task = functools.partial(encode, options=options)
    if num_workers == 1:
        yield from map(task, iter_sources(files))
        return
    # spawn: tokenizer libraries start threads, which a forked process would inherit half-alive.
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        yield from pool.imap(task, iter_sources(files), chunksize=16)


def write_dataset(
    files: Sequence[Path], prefix: Path, options: EncodeOptions, num_workers: int = 1
) -> Totals:
    """Encode `files` into PREFIX.bin and PREFIX.idx, which appear only when they are complete.

    Raises ValueError when no document holds any text, or as `encode` does.
    """
    with warnings.catch_warnings():
        # Notices of Megatron's about optional packages for training; nothing trains here.
        warnings.simplefilter("ignore", UserWarning)
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_path, idx_path = _dataset_paths(prefix)
    partial_bin, partial_idx = (Path(f"{path}.partial") for path in (bin_path, idx_path))
    totals = Totals()
    try:
        builder = IndexedDatasetBuilder(
            str(partial_bin), dtype=DType.optimal_dtype(vocab_size(options))
        )
        for encoded in _with_progress(encode_all(files, options, num_workers), files):
            _add(builder, encoded, totals)
        builder.finalize(str(partial_idx))
        if totals.num_documents == 0:
            raise ValueError(f"no text found in {len(files)} files: every document is empty")
        os.replace(partial_bin, bin_path)
        os.replace(partial_idx, idx_path)
    finally:
        partial_bin.unlink(missing_ok=True)
        partial_idx.unlink(missing_ok=True)
    return totals


def _add(builder, encoded: Encoded, totals: Totals) -> None:
    totals.num_bad_utf8 += encoded.had_bad_utf8
    if encoded.token_ids.size == 0:
        totals.num_empty += 1
        return
    builder.add_document(encoded.token_ids, [encoded.token_ids.size])
    totals.num_documents += 1
    totals.num_tokens += encoded.token_ids.size


def _with_progress(documents: Iterator[Encoded], files: Sequence[Path]) -> Iterator[Encoded]:
    num_bytes = sum(path.stat().st_size for path in files)
    # disable=None: no bar when the screen is a file, such as a CI log.
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for encoded in documents:
            yield encoded
            bar.update(encoded.num_source_bytes)


def _dataset_paths(prefix: Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


# ---------------------------------------------------------------------------- command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Other tokenizer options (--tokenizer-model, --vocab-file, --merge-file, "
        "--vocab-size, ...) are Megatron's own and mean what they mean in training.",
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH",
        help="folders, text files, or JSON Lines files (.jsonl, .json)")  # fmt: skip
    add("--output-prefix", type=Path, required=True, metavar="PREFIX",
        help="writes PREFIX.bin and PREFIX.idx; train with --data-path PREFIX")  # fmt: skip
    add("--glob", nargs="+", default=list(DEFAULT_GLOBS), metavar="PATTERN",
        help="names of the files to read from folders (default: %(default)s)")  # fmt: skip
    add("--exclude", nargs="+", default=[], metavar="NAME",
        help="names of subfolders and files to leave out of folders")  # fmt: skip
    add("--json-key", default="text", help="key of the text in JSON Lines (default: %(default)s)")
    add("--tokenizer-type", default=BYTES, metavar="TYPE",
        help="'bytes', or a tokenizer that Megatron knows, such as HuggingFaceTokenizer or "
        "SentencePieceTokenizer (default: %(default)s)")  # fmt: skip
    add("--bad-utf8", choices=BAD_UTF8_POLICIES, default="replace",
        help="a document that is not UTF-8: put U+FFFD for bad bytes, skip the document, or fail; "
        "byte-level data takes bytes as they are (default: %(default)s)")  # fmt: skip
    add("--no-append-eod", dest="append_eod", action="store_false",
        help="do not close each document with an end-of-document token")  # fmt: skip
    add("--workers", type=int, default=1, help="processes that tokenize (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser


def run(args: argparse.Namespace, tokenizer_argv: Sequence[str]) -> Totals:
    """Check the options and write the dataset. Raises ValueError with a sentence for the user."""
    if args.tokenizer_type == BYTES and tokenizer_argv:
        raise ValueError(
            f"unknown options {' '.join(tokenizer_argv)}; tokenizer options need --tokenizer-type"
        )
    if args.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {args.workers}")
    existing = [path for path in _dataset_paths(args.output_prefix) if path.exists()]
    if existing and not args.overwrite:
        raise ValueError(f"{existing[0]} exists; pass --overwrite to replace it")
    options = EncodeOptions(
        tokenizer_type=args.tokenizer_type,
        tokenizer_argv=tuple(tokenizer_argv),
        json_key=args.json_key,
        bad_utf8=args.bad_utf8,
        append_eod=args.append_eod,
    )
    files = find_files(args.input, args.glob, args.exclude)
    return write_dataset(files, args.output_prefix, options, args.workers)


def main(argv: Sequence[str] | None = None) -> None:
    args, tokenizer_argv = make_parser().parse_known_args(argv)
    try:
        totals = run(args, tokenizer_argv)
    except (ValueError, OSError) as error:
        sys.exit(f"preprocess_text.py: {error}")
    print(
        f"wrote {args.output_prefix}.bin and .idx: {totals.num_documents:,} documents, "
        f"{totals.num_tokens:,} tokens"
    )
    if totals.num_empty:
        print(f"left out {totals.num_empty:,} documents that are empty or skipped")
    if totals.num_bad_utf8:
        print(f"{totals.num_bad_utf8:,} documents were not UTF-8 (--bad-utf8 {args.bad_utf8})")


if __name__ == "__main__":
    main()
