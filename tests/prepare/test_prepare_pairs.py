"""`prepare` makes a prompt and two responses of a preference pair, whatever the shape of its record."""

import numpy as np
import pytest
from batches import error_of, sections, write_config
from prepared import CHATML, turns
from record_files import lines
from tokenizer_makers import byte_level_json, save_huggingface
from tokenizers import Tokenizer

from grain_sft import GrainSftError, open_corpus
from grain_sft.corpus import pair_lengths
from grain_sft.prepare import Dataset, Rendered, Request, convert, prepare
from grain_sft.prepare.pairs import pair_of


def shapes(number):
    """Return one pair as a record of each shape that datasets have, and as the texts (prompt, chosen, rejected)."""
    prompt, chosen = f"question {number:03}?" + "\nwhy" * (number % 7), f"yes {number}"
    rejected = "no" + " way" * (number % 5)
    both = {"chosen": turns(prompt, chosen), "rejected": turns(prompt, rejected)}
    replies = {"chosen": turns(prompt, chosen)[1:], "rejected": turns(prompt, rejected)[1:]}
    records = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        both | {"score": 0.5},
        {"prompt": turns(prompt)} | replies,
        {"prompt": turns(prompt)} | both,
        {"prompt": prompt} | both,
        {"prompt": prompt} | replies,
        {"instruction": prompt[:13], "input": prompt[14:], "system": "", "chosen": chosen, "rejected": rejected},
    ]
    return records, (prompt, chosen, rejected)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_huggingface(folder, byte_level_json(("<|im_start|>", "<|im_end|>")), eos="<|im_end|>", chat_template=CHATML)
    return folder


@pytest.fixture
def request_of(tmp_path, tokenizer):
    def made(records, template="hf", format="pairs", **options):
        (tmp_path / "pairs.jsonl").write_bytes(lines(records))
        return Request((Dataset((tmp_path / "pairs.jsonl",)),), template, str(tokenizer), format, **options)

    return made


def parts_of(corpus):
    """Yield the ids of the prompt and of the two responses of each pair."""
    lengths = pair_lengths(corpus)
    for number, document in enumerate(corpus.iter_documents()):
        prompt, chosen, rejected = np.split(document.tokens, lengths[number].cumsum()[:-1])
        assert document.loss.tolist() == [False] * len(prompt) + [True] * (len(chosen) + len(rejected))
        yield prompt.tolist(), chosen.tolist(), rejected.tolist()


def test_every_shape_gives_the_ids_of_the_rendered_chats(request_of, tokenizer, tmp_path):
    records, expected = [], []
    for number in range(180):
        found, texts = shapes(number)
        records += found
        expected += [texts] * len(found)
    manifest = prepare(request_of(records, shuffle=False), tmp_path / "out", workers=1)
    assert manifest["splits"]["train"]["documents"] == len(records) == 1260
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def ids(text):
        return library.encode(text, add_special_tokens=False).ids

    corpus = open_corpus(tmp_path / "out" / "train")
    found = dict(zip((line for _, line in corpus.sources.tolist()), parts_of(corpus), strict=True))
    for line, (prompt, chosen, rejected) in enumerate(expected, 1):
        shared = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert found[line][0] == ids(shared), line
        for part, text in zip(found[line][1:], (chosen, rejected), strict=True):
            assert found[line][0] + part == ids(f"{shared}{text}<|im_end|>"), line


def test_earlier_answers_belong_to_the_prompt_and_take_no_loss(request_of, tmp_path):
    begin = ("a?", "b", "c?")
    prepare(request_of([{"chosen": turns(*begin, "d"), "rejected": turns(*begin, "e")}]), tmp_path / "out", workers=1)
    [(prompt, chosen, rejected)] = parts_of(open_corpus(tmp_path / "out" / "train"))
    assert len(chosen) == len(rejected) == 2 and len(prompt) > 20


def test_the_prompt_of_two_texts_is_the_tokens_that_both_begin_with(request_of, tmp_path):
    """MaxText's `DPODataFormatting` divides data of two columns in the same way."""
    begins = [f"Human: {number}? Assistant:" for number in range(50)]
    records = [{"chosen": f"{begin} yes", "rejected": f"{begin} no no"} for begin in begins]
    prepare(request_of(records, "text"), tmp_path / "out", workers=1)
    for prompt, chosen, rejected in parts_of(open_corpus(tmp_path / "out" / "train")):
        assert prompt and chosen[0] != rejected[0]


def test_an_empty_response_is_refused():
    short, long = (Rendered(np.arange(size, dtype=np.uint32), np.ones(size, np.float32)) for size in (2, 3))
    for pair in ((short, long), (long, short)):
        with pytest.raises(GrainSftError, match="one has no token"):
            pair_of(*pair)


def test_commands_show_a_pair_and_other_layouts_and_formats_refuse_it(request_of, tmp_path, tokenizer, run_command):
    request = request_of([record for number in range(8) for record in shapes(number)[0]], shuffle=False)
    path, out = request.datasets[0].paths[0], tmp_path / "out"
    words = ["prepare", path, *f"--template hf --tokenizer {tokenizer} --format pairs --output {out}".split()]
    assert "| yes 0<|im_end|>no<|im_end|>" in run_command(*words, "--dry-run", "1").out
    run_command(*words)
    config = sections(out, 64, layout="pairs", order="sequential")
    run = write_config(tmp_path / "pairs.json", config)
    run_command("verify", run, "--full")
    assert "segment 2, chosen: tokens" in run_command("inspect", run, "--step", "0", "--row", "0").out
    assert "seen 1 times" in run_command("trace", run, "--record", "3").out
    for layout in ("packed", "padded", "windows"):
        refused = error_of(config | {"layout": {"kind": layout, "sequence_length": 64}})
        assert "would train on the pairs' rejected responses" in refused
    with pytest.raises(GrainSftError, match="preference pairs are not converted"):
        convert(out, tmp_path / "other", "olmo")
    np.array([5, 1], np.uint32).tofile(tmp_path / "plain.npy")
    with pytest.raises(GrainSftError, match=r"plain\.npy: holds no preference pairs, .* Choose another format"):
        convert(tmp_path / "plain.npy", tmp_path / "other", "pairs", eos_token_id=1, dtype="uint32")


UNTRAINED = [[{"role": "assistant", "content": text, "weight": 0}] for text in "bc"]
NOT_PAIRS = [
    (shapes(1)[0][0], {"format": "olmo"}, r"pairs.jsonl:1: the record is a preference pair.* Give --format pairs"),
    ({"messages": turns("a", "b")}, {}, "the record is not a preference pair"),
    ({"chosen": "a", "prompt": "b"}, {}, "rejected"),
    ({"chosen": turns("a", "b"), "rejected": turns("a", "b")}, {}, "the responses are equal"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, {}, "the responses are equal"),
    ({"prompt": "a", "chosen": UNTRAINED[0], "rejected": UNTRAINED[1]}, {}, "chosen: no token of the response"),
    ({"prompt": "a", "chosen": turns("a ", "b"), "rejected": turns("a ", "c")}, {}, "begins with the role 'user'"),
    ({"question": "a", "chosen": "b", "rejected": "c"}, {}, "has no prompt.* --schema preference:prompt=question"),
    ({"Input": "a"} | dict.fromkeys(("chosen", "rejected"), turns("a", "b")[1:]), {}, "preference:prompt=Input"),
    (shapes(1)[0][0], {"max_length": 10}, "pairs are cut by their layout"),
]


@pytest.mark.parametrize(("record", "options", "message"), NOT_PAIRS)
def test_wrong_pairs_and_options_are_refused_and_nothing_is_written(request_of, tmp_path, record, options, message):
    with pytest.raises(GrainSftError, match=message):
        prepare(request_of([record], **options), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
