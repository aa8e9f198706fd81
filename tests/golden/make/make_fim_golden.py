"""Write `fim.json` with the original Megatron-LM: texts whose middles `GPTFIMDataset` moves to their ends.

Needed: `megatron/training/datasets/fim_dataset.py` of NVIDIA/Megatron-LM at `COMMIT`, megatron-core 0.16.1, torch,
sentencepiece, and the SentencePiece model MODEL, which goes into the file.
"""

import base64
import itertools
import types
import zlib
from typing import Any

import numpy as np
import sentencepiece
from making import import_file, options, versions, write_json

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
SPLIT, WITHOUT = "<pad>", "# whole"
TEXTS = (
    "def main():\n    return 1\n", "a", "漢字 and kana かな, 한국어", "emoji 👩‍👩‍👧‍👦 end", "  spaces  at  both  ends  ",
    "the quick brown fox jumps over the lazy dog. " * 5, "# whole text", "one part<pad>another<pad>the last",
    "<pad><pad>after<pad><pad>empty parts<pad>", "# whole part<pad>other<pad># whole, too", "x<pad>", "<pad>",
)  # fmt: skip
TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
RATES = {"fim_rate": 0.8, "fim_spm_rate": 0.5, "fim_fragment_rate": 0.7}


class Tokenizer:
    """A SentencePiece model with the two methods that `GPTFIMDataset` calls."""

    def __init__(self, model: bytes) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def ids_to_text(self, ids: Any, remove_special_tokens: bool = True) -> str:
        return str(self.processor.decode([int(number) for number in ids]))

    def text_to_ids(self, text: str) -> list[int]:
        return list(self.processor.encode(text))


class Draws:
    """Records the random numbers of `GPTFIMDataset`: [chosen, suffix first, first cut, second cut] of each text or part."""

    def __init__(self, seed: int) -> None:
        self.random, self.made = np.random.RandomState(seed), list[list[int]]()
        self.cut = False

    def binomial(self, trials: int, rate: float) -> int:
        found = self.random.binomial(trials, rate)
        if self.cut:
            self.made[-1][1] = found
        else:
            self.made.append([found, 0, 0, 0])
        self.cut = False
        return found

    def randint(self, **bounds: int) -> Any:
        found = self.random.randint(**bounds)
        self.made[-1][2:], self.cut = found.tolist(), True
        return found


if __name__ == "__main__":
    given = options("fim.json", "fim_dataset", "model")
    original, model = import_file(given.fim_dataset), given.model.read_bytes()
    tokenizer = Tokenizer(model)
    prefix, middle, suffix, split = map(tokenizer.processor.piece_to_id, (*TOKENS, SPLIT))
    cases: list[dict[str, Any]] = []
    for seed, text, parts, without in itertools.product(range(5), TEXTS, (False, True), (None, WITHOUT)):
        fragments = text.split(SPLIT)
        if (not parts and len(fragments) > 1) or (without and without not in text):
            continue
        ids = [number for part in fragments for number in (split, *tokenizer.text_to_ids(part))][1:]
        this = original.GPTFIMDataset.__new__(original.GPTFIMDataset)
        draws = this.np_rng = Draws(seed)
        this.fim_rate, this.fim_spm_rate, this.fragment_fim_rate = RATES.values()
        this.prefix_tok_id, this.middle_tok_id, this.suffix_tok_id, this.pad_tok_id = prefix, middle, suffix, 3
        this.fim_split_sample, this.no_fim_prefix = split if parts else None, without
        this.config = types.SimpleNamespace(tokenizer=types.SimpleNamespace(_tokenizer=tokenizer))
        found = this._fim_split_and_permute_sequence(np.array(ids, np.int64)).tolist()
        case = {"text": text, "split": SPLIT if parts else None, "without": without, "draws": draws.made, "ids": found}
        cases.append(case)
    made_by = {**versions("megatron-core", "numpy", "sentencepiece"), "Megatron-LM": COMMIT}
    packed = base64.b64encode(zlib.compress(model, 9)).decode()
    named = {str(number): each for number, each in enumerate(cases)}
    write_json(given.out / "fim.json", {"made_by": made_by, "model": packed, "rates": RATES, "cases": named}, ["cases"])
