"""Write `fim.json` with the original Megatron-LM: texts whose middle `GPTFIMDataset` moves to their end.

Needed: `megatron/training/datasets/fim_dataset.py` of NVIDIA/Megatron-LM at `COMMIT`, megatron-core 0.16.1, torch,
sentencepiece, and the SentencePiece model MODEL, which goes into the file.
"""

import base64
import types
import zlib
from typing import Any

import numpy as np
import sentencepiece
from making import import_file, options, versions, write_json

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
TEXTS = (
    "def main():\n    return 1\n", "a", "", "漢字 and kana かな, 한국어", "emoji 👩‍👩‍👧‍👦 end", "  spaces  at  both  ends  ",
    "the quick brown fox jumps over the lazy dog. " * 5,
)  # fmt: skip
TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


class Tokenizer:
    """The model behind the two methods that `GPTFIMDataset` calls."""

    def __init__(self, model: bytes) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def ids_to_text(self, ids: Any, remove_special_tokens: bool) -> str:
        return str(self.processor.decode([int(number) for number in ids]))

    def text_to_ids(self, text: str) -> list[int]:
        return list(self.processor.encode(text))


if __name__ == "__main__":
    given = options("fim.json", "fim_dataset", "model")
    original, model = import_file(given.fim_dataset), given.model.read_bytes()
    tokenizer = Tokenizer(model)
    prefix, middle, suffix = (tokenizer.processor.piece_to_id(text) for text in TOKENS)
    cases: list[dict[str, Any]] = []
    for seed in range(6):
        for text in TEXTS:
            draws = np.random.RandomState(seed)
            draws.binomial(1, 1.0)
            first, second = sorted(draws.randint(low=0, high=len(text) + 1, size=2).tolist())
            suffix_first = bool(draws.binomial(1, 0.5))
            this = types.SimpleNamespace(np_rng=np.random.RandomState(seed))
            ids = original.GPTFIMDataset._permute(
                this, np.array(tokenizer.text_to_ids(text), np.int64), 1.0, 0.5, types.SimpleNamespace(_tokenizer=tokenizer),
                truncate_or_pad=False, suffix_tok_id=suffix, prefix_tok_id=prefix, middle_tok_id=middle,
            )  # fmt: skip
            cases.append({"text": text, "cuts": [first, second], "suffix_first": suffix_first, "ids": ids.tolist()})
    made_by = {**versions("megatron-core", "numpy", "sentencepiece"), "Megatron-LM": COMMIT}
    packed = base64.b64encode(zlib.compress(model, 9)).decode()
    found = {"made_by": made_by, "model": packed, "cases": {str(number): each for number, each in enumerate(cases)}}
    write_json(given.out / "fim.json", found, ["cases"])
