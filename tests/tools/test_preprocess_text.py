"""Text in, tokens out: every document comes back from the dataset, whole and in order."""

import json
import random
from pathlib import Path

import numpy as np
import preprocess_text
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

EOD_ID = preprocess_text.BYTE_EOD_ID
ALPHABET = "abc xyz\n0123éüß√漢字🚀\t"


def random_text(rng: random.Random, max_chars: int = 400) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(1, max_chars)))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Fresh texts in every run; the seed is printed when a test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def preprocess(prefix: Path, *argv: object) -> None:
    preprocess_text.main(["--output-prefix", str(prefix), *map(str, argv)])


def documents(prefix: Path) -> list[np.ndarray]:
    """The token ids of each document, boundaries taken from the document index."""
    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices
    return [
        np.concatenate([dataset[idx] for idx in range(first, last)])
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def byte_texts(prefix: Path) -> list[str]:
    """The documents as text; checks that each ends with the one EOD it holds."""
    texts = []
    for token_ids in documents(prefix):
        assert token_ids[-1] == EOD_ID
        assert (token_ids[:-1] < 256).all()
        texts.append(bytes(token_ids[:-1].astype(np.uint8)).decode())
    return texts


def write_tree(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def write_json_lines(path: Path, texts: list[str], key: str = "text") -> None:
    lines = [json.dumps({"id": idx, key: text}) for idx, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------- round trips


def test_folder_round_trip_in_path_order(tmp_path, rng):
    names = ["b/z.txt", "b.txt", "a.txt", "a/b/c.md", "a/b.txt", "Z.txt"]
    texts = {name: random_text(rng) for name in names}
    write_tree(tmp_path / "in", texts)
    preprocess(tmp_path / "data", "--input", tmp_path / "in")
    assert byte_texts(tmp_path / "data") == [texts[name] for name in sorted(names)]


def test_json_lines_round_trip(tmp_path, rng):
    texts = [random_text(rng) for _ in range(20)]
    write_json_lines(tmp_path / "in.jsonl", texts, key="content")
    preprocess(tmp_path / "data", "--input", tmp_path / "in.jsonl", "--json-key", "content")
    assert byte_texts(tmp_path / "data") == texts


def test_inputs_keep_the_order_of_the_command_line(tmp_path, rng):
    texts = [random_text(rng) for _ in range(4)]
    write_tree(tmp_path, {"z.log": texts[0], "folder/only.txt": texts[3]})
    write_json_lines(tmp_path / "m.json", texts[1:3])
    inputs = [tmp_path / "z.log", tmp_path / "m.json", tmp_path / "folder"]
    preprocess(tmp_path / "data", "--input", *inputs)
    assert byte_texts(tmp_path / "data") == texts


def test_workers_change_nothing(tmp_path, rng):
    write_tree(tmp_path / "in", {f"{idx}.txt": random_text(rng) for idx in range(50)})
    write_json_lines(tmp_path / "in" / "lines.jsonl", [random_text(rng) for _ in range(50)])
    preprocess(tmp_path / "one", "--input", tmp_path / "in")
    preprocess(tmp_path / "two", "--input", tmp_path / "in", "--workers", 2)
    for suffix in (".bin", ".idx"):
        one, two = (Path(f"{tmp_path / name}{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_globs_and_excluded_names(tmp_path, rng):
    names = ["keep.py", "keep.txt", "skip/keep.py", "sub/keep.py", "sub/skip/deep/keep.py"]
    texts = {name: random_text(rng) for name in names}
    write_tree(tmp_path / "in", texts)
    preprocess(tmp_path / "data", "--input", tmp_path / "in", "--glob", "*.py", "--exclude", "skip")
    assert byte_texts(tmp_path / "data") == [texts["keep.py"], texts["sub/keep.py"]]


def test_without_eod(tmp_path, rng):
    text = random_text(rng)
    write_tree(tmp_path, {"a.txt": text})
    preprocess(tmp_path / "data", "--input", tmp_path / "a.txt", "--no-append-eod")
    (token_ids,) = documents(tmp_path / "data")
    assert bytes(token_ids.astype(np.uint8)).decode() == text


def test_empty_documents_are_left_out_and_counted(tmp_path, rng, capsys):
    text = random_text(rng)
    write_tree(tmp_path / "in", {"a.txt": "", "b.txt": text, "c.txt": ""})
    preprocess(tmp_path / "data", "--input", tmp_path / "in")
    assert byte_texts(tmp_path / "data") == [text]
    assert "left out 2 documents" in capsys.readouterr().out


def test_byte_tokens_take_any_bytes(tmp_path, rng):
    data = rng.randbytes(1000)
    (tmp_path / "a.txt").write_bytes(data)
    preprocess(tmp_path / "data", "--input", tmp_path / "a.txt")
    (token_ids,) = documents(tmp_path / "data")
    assert token_ids[-1] == EOD_ID
    assert bytes(token_ids[:-1].astype(np.uint8)) == data


# ---------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    """A small SentencePiece model of its own; byte fallback makes any text come back."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text(Path(preprocess_text.__file__).read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "model"), vocab_size=600, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, minloglevel=2,
    )  # fmt: skip
    return folder / "model.model"


def sentencepiece_flags(model: Path) -> tuple[object, ...]:
    return "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model


def decoded(model: Path, token_ids: np.ndarray) -> str:
    """The document's text; checks that it ends with SentencePiece's end-of-sequence token."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(str(model))
    assert token_ids[-1] == processor.eos_id()
    return processor.decode(token_ids[:-1].tolist())


def test_sentencepiece_round_trip(tmp_path, rng, sentencepiece_model):
    texts = [random_text(rng).replace("\t", " ").strip() or "x" for _ in range(5)]
    write_json_lines(tmp_path / "in.jsonl", texts)
    preprocess(
        tmp_path / "data", "--input", tmp_path / "in.jsonl",
        *sentencepiece_flags(sentencepiece_model),
    )  # fmt: skip
    token_ids = documents(tmp_path / "data")
    assert [decoded(sentencepiece_model, ids) for ids in token_ids] == texts


@pytest.mark.parametrize(("policy", "expected"), [("replace", ["good", "b�d"]), ("skip", ["good"])])
def test_bad_utf8_policy(tmp_path, capsys, sentencepiece_model, policy, expected):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("good")
    (tmp_path / "in" / "b.txt").write_bytes(b"b\xffd")
    preprocess(
        tmp_path / "data", "--input", tmp_path / "in", "--bad-utf8", policy,
        *sentencepiece_flags(sentencepiece_model),
    )  # fmt: skip
    assert [decoded(sentencepiece_model, ids) for ids in documents(tmp_path / "data")] == expected
    assert "1 documents were not UTF-8" in capsys.readouterr().out


def test_bad_utf8_can_fail(tmp_path, sentencepiece_model):
    (tmp_path / "a.txt").write_bytes(b"b\xffd")
    with pytest.raises(SystemExit, match=r"a\.txt is not UTF-8"):
        preprocess(
            tmp_path / "data", "--input", tmp_path / "a.txt", "--bad-utf8", "fail",
            *sentencepiece_flags(sentencepiece_model),
        )  # fmt: skip


# ---------------------------------------------------------------------------- errors


def test_missing_input(tmp_path):
    with pytest.raises(SystemExit, match="nowhere does not exist"):
        preprocess(tmp_path / "data", "--input", tmp_path / "nowhere")


def test_no_documents_found(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.dat").write_text("text")
    with pytest.raises(SystemExit, match=r"no documents found.*\*\.txt.*--glob"):
        preprocess(tmp_path / "data", "--input", tmp_path / "in")


def test_only_empty_documents(tmp_path):
    write_tree(tmp_path / "in", {"a.txt": ""})
    with pytest.raises(SystemExit, match="every document is empty"):
        preprocess(tmp_path / "data", "--input", tmp_path / "in")
    assert not list(tmp_path.glob("data*"))


def test_existing_output_needs_overwrite(tmp_path, rng):
    texts = [random_text(rng), random_text(rng)]
    write_tree(tmp_path, {"a.txt": texts[0], "b.txt": texts[1]})
    preprocess(tmp_path / "data", "--input", tmp_path / "a.txt")
    with pytest.raises(SystemExit, match=r"data\.bin exists; pass --overwrite"):
        preprocess(tmp_path / "data", "--input", tmp_path / "b.txt")
    assert byte_texts(tmp_path / "data") == [texts[0]]
    preprocess(tmp_path / "data", "--input", tmp_path / "b.txt", "--overwrite")
    assert byte_texts(tmp_path / "data") == [texts[1]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "fine"', "in.jsonl:3 is not a line of JSON"),
        ('{"body": "fine"}', "in.jsonl:3 has no text under the key 'text'"),
        ('{"text": 7}', "in.jsonl:3 has no text under the key 'text'"),
        ('["text"]', "in.jsonl:3 has no text under the key 'text'"),
    ],
)
def test_bad_json_line_is_named_and_leaves_nothing(tmp_path, line, message):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(SystemExit, match=message):
        preprocess(tmp_path / "data", "--input", tmp_path / "in.jsonl")
    assert not list(tmp_path.glob("data*"))


def test_tokenizer_options_need_a_tokenizer(tmp_path):
    write_tree(tmp_path, {"a.txt": "text"})
    with pytest.raises(SystemExit, match="--tokenizer-model x; tokenizer options need"):
        preprocess(tmp_path / "data", "--input", tmp_path / "a.txt", "--tokenizer-model", "x")


def test_workers_must_be_positive(tmp_path):
    write_tree(tmp_path, {"a.txt": "text"})
    with pytest.raises(SystemExit, match="--workers must be at least 1, not 0"):
        preprocess(tmp_path / "data", "--input", tmp_path / "a.txt", "--workers", 0)
