"""Plain documents: their tokens, where they begin and end, and the corpora that are made of them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grain_sft import IndexSampler, NpyDataSource, PackedLayout, Pipeline, ShiftTargets, WindowLayout, open_corpus
from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare, train_tokenizer

FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    words = [f"the question and the answer, word {number}" for number in range(100)]
    path.write_bytes(train_tokenizer(words, 400, FIM))
    return path


def write(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return path


def texts_of(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("the answer\n\t é漢😀<|", k=draw.randrange(1, 200))) for _ in range(count)]


def request_of(spm: Path, path: Path, **options: Any) -> Request:
    return Request((Dataset((str(path),)),), "text", str(spm), **{"format": "olmo", **options})


def made(spm: Path, path: Path, **options: Any) -> tuple[Corpus, dict[str, Any]]:
    """Return the corpus of a file's documents, and its manifest."""
    out = path.parent / f"out-{len(list(path.parent.iterdir()))}"
    manifest = prepare(request_of(spm, path, **options), out, workers=1)
    return open_corpus(out), manifest


def test_text_becomes_batches(spm: Path, tmp_path: Path) -> None:
    texts = texts_of(300)
    corpus, manifest = made(spm, write(tmp_path / "a.jsonl", texts), part_bytes=4000, shuffle=False)
    assert len(corpus.shards) > 5 and not corpus.has_loss and not list(tmp_path.rglob("labels_mask*"))
    tokenizer = load_tokenizer(spm)
    ids = [[*tokenizer.encode([text])[0], tokenizer.eos_token_id] for text in texts]
    assert [document.tokens.tolist() for document in corpus.iter_documents()] == ids
    assert corpus.sources is not None and corpus.sources[:, 1].tolist() == list(range(1, 301))
    stream = np.concatenate([np.array(part) for part in ids])
    assert manifest["splits"]["train"]["trainable_tokens"] == len(stream)
    source = NpyDataSource(WindowLayout(corpus, 64))
    pipeline = Pipeline(
        source, IndexSampler(len(source), global_batch_size=4, seed=0, order="sequential"), [ShiftTargets()]
    )
    batch = pipeline[2]
    assert np.array_equal(batch["inputs"].ravel(), stream[2 * 256 : 3 * 256])
    assert batch["targets_segmentation"].mean() == 63 / 64
    packed = NpyDataSource(PackedLayout(corpus, 512))
    assert sum(int((packed[row]["segment_ids"] > 0).sum()) for row in range(len(packed))) == len(stream)


def test_masks_that_are_missing_are_still_an_error(spm: Path, tmp_path: Path) -> None:
    """Only metadata that say that there are no masks let a corpus have none."""
    made(spm, write(tmp_path / "a.jsonl", texts_of(20)))
    train = next(tmp_path.glob("out-*")) / "train"
    assert not open_corpus(train / "token_ids_part_0000.npy").has_loss
    for name in ("corpus.json", "dataset_statistics.json"):
        path = train / name
        path.write_text(path.read_text().replace('"label_masks": false', '"label_masks": true'))
    for where in (train, train.parent, train / "*.npy"):
        with pytest.raises(CorpusError, match="Without a mask, all of its tokens would take loss"):
            open_corpus(where)
