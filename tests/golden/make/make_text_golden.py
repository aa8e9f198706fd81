"""Write `text_olmo.json`: OLMo-core's instances of texts that SentencePiece encoded.

The SentencePiece model is the one in `fim.json`. Needed: ai2-olmo-core 3.0.0 and torch, sentencepiece, numpy.
"""

import base64
import hashlib
import json
import random
import tempfile
import zlib
from pathlib import Path

import numpy as np
import sentencepiece
from making import GOLDEN, olmo_windows, options, versions, write_json

LENGTH = 64


def texts() -> list[str]:
    draw = random.Random(7)
    words = ["the", "quick", "brown", "漢字", "é", "\U0001f600", "\n\n", "\t", "def main():", ""]
    return [" ".join(draw.choices(words, k=draw.choice([1, 3, 20, 90]))) for _ in range(60)]


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(array, "<i8").tobytes()).hexdigest()


if __name__ == "__main__":
    out = options("text_olmo.json").out
    model = zlib.decompress(base64.b64decode(json.loads((GOLDEN / "fim.json").read_text())["model"]))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    eos = processor.eos_id()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tokens.npy")
        np.array([token for ids in processor.encode(texts()) for token in (*ids, eos)], np.uint16).tofile(path)
        ids = {"pad_token_id": processor.pad_id(), "eos_token_id": eos, "vocab_size": processor.vocab_size()}
        chunks = {"generate_doc_lengths": True, "max_target_sequence_length": LENGTH}
        windows = olmo_windows([path], LENGTH, np.uint16, **ids, **chunks)
        found = {
            "windows": [digest(windows[n]["input_ids"].numpy()) for n in range(len(windows))],
            "document_lengths": [windows[n]["doc_lens"].tolist() for n in range(len(windows))],
        }
    made_by = versions("ai2-olmo-core", "sentencepiece", "numpy")
    write_json(out / "text_olmo.json", {"made_by": made_by, "length": LENGTH, "texts": texts(), **found})
