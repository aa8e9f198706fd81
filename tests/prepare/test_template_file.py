"""`grain-sft prepare --template FILE`: Jinja chat templates from files, with SentencePiece models and tiktoken files."""

from __future__ import annotations

import json

import pytest
from tokenizer_makers import save_sentencepiece, save_tiktoken

from grain_sft import open_corpus
from grain_sft.cli.main import main

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("save", [save_sentencepiece, save_tiktoken])
def test_a_template_in_a_file_prepares_a_corpus_whose_documents_end_in_eos(tmp_path, save, capsys):
    pytest.importorskip("jinja2")
    options = {"eos": "<e>"} if save is save_tiktoken else {}
    tokenizer = save(tmp_path, **({"special": ("<e>",)} if options else {}), **options)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello <|im_end|>"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    command = ["prepare", str(tmp_path / "chats.jsonl"), "--template", str(tmp_path / "chat.jinja")]
    command += ["--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    assert main(command) == 0, capsys.readouterr().err
    corpus = open_corpus(tmp_path / "out")
    (document,) = corpus.iter_documents()
    assert document.tokens[-1] == corpus.eos_token_id
    assert main([*command, "--chat-template", str(tmp_path / "chat.jinja"), "--dry-run"]) == 1
    assert "expected one template" in capsys.readouterr().err


def test_a_word_that_is_neither_template_nor_file_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["prepare", "x.jsonl", "--template", "primmer", "--tokenizer", "y", "--output", str(tmp_path / "out")])
    assert "'primmer' is neither a template nor a file" in capsys.readouterr().err
