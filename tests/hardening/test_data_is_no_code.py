"""Input files are data: no code in them is run, and no path in them leads out of the user's `root`."""

import contextlib
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from sft_files import documents, write_olmo

import grain_sft
from grain_sft.errors import CorpusError, PrepareError, RecordError
from grain_sft.prepare.templates.chat_template import ChatTemplate
from grain_sft.prepare.tokenizers import load_tokenizer

PACKAGE = Path(grain_sft.__file__).parent
RUNS_CODE = re.compile(
    r"(?<![\w.])(eval|exec|compile|__import__)\("
    r"|^\s*(import|from) (pickle|cPickle|dill|marshal|shelve|joblib|torch|code)\b"
    r"|yaml\.(load_all|full_load|full_load_all|unsafe_load)\b|yaml\.(Full|Unsafe)?Loader\b|yaml\.load\((?!text, _Loader\))"
    r"|os\.(system|popen)\(|shell=True|(allow_pickle|trust_remote_code)=(?!False)",
    re.MULTILINE,
)
# These files unpickle only what processes of the same run wrote.
PICKLED_WORK = [(f"{name}.py", "import pickle") for name in ("prepare/work", "prepare/worker", "pipeline/data_loader")]
ONLY_WRITTEN = [("registry.py", "import marshal")]  # the registry hashes the code of functions, and reads none


def test_nothing_in_the_package_unpickles_evaluates_or_runs_what_it_reads():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        runs = {match[0].strip() for match in RUNS_CODE.finditer(text)}
        found += [(name, each) for each in runs if (name, each) not in PICKLED_WORK + ONLY_WRITTEN]
        assert "_Loader)" not in text or "class _Loader(yaml.SafeLoader)" in text, name
    assert not found
    for line in ("import pickle", "eval('1')", "yaml.load(text)", "np.load(path, allow_pickle=True)"):
        assert RUNS_CODE.search(line), line
    assert not RUNS_CODE.search("re.compile('x'); yaml.load(text, _Loader)")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch bomb-went-off",)


TRAINING = ("a/train_idx.npy", "a/train_input_ids.bin", "a/train_labels.bin")


def test_an_array_of_objects_is_never_unpickled_in_place_of_any_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "bomb.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    data = (tmp_path / "bomb.npy").read_bytes()
    for name in (*TRAINING, "b/x.npy", "index.json", "mix.txt", "c.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        for where in (path, path.parent):
            with pytest.raises(grain_sft.GrainSftError):
                list(grain_sft.open_corpus(where).iter_documents())
        with pytest.raises(grain_sft.GrainSftError):
            grain_sft.load(path)
    (tmp_path / "config.yaml").write_text("corpus: !!python/object/apply:os.system ['touch bomb-went-off']\n")
    with pytest.raises(grain_sft.GrainSftError, match="not YAML"):
        grain_sft.load(tmp_path / "config.yaml")
    assert not (tmp_path / "bomb-went-off").exists()


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "{{ self._TemplateReference__context.eval_ctx.environment }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ lipsum.__globals__['os'].popen('touch escaped').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
)


@pytest.mark.parametrize("text", ESCAPES)
def test_a_chat_template_can_not_reach_out_of_its_sandbox(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<u>": 1}, unk_token="<u>"))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    rendered = ""
    with contextlib.suppress(RecordError, PrepareError):
        rendered = ChatTemplate(tokenizer, text).render([{"role": "user", "content": "a"}])
    assert not rendered.strip(), rendered  # an undefined attribute renders as nothing
    assert not (tmp_path / "escaped").exists()


@pytest.fixture
def folders(tmp_path, write_tokens):
    """The folder `data`, and next to it the folder `secret`, which is not part of the data."""
    for name in ("data", "secret"):
        write_tokens(f"{name}/a.npy", range(100))
    return tmp_path / "data", tmp_path / "secret"


@pytest.mark.parametrize("entry", ["../secret/a.npy", "{secret}/a.npy", "x/../../secret/a.npy", "link.npy", "dir/a.npy"])
def test_a_mix_an_index_a_list_or_a_folder_leads_to_no_file_outside_of_the_root(folders, entry):
    """`entry` is a relative path, an absolute path or a link. Without a root, any path is allowed."""
    data, secret = folders
    (data / "x").mkdir()
    (data / "link.npy").symlink_to(secret / "a.npy")
    (data / "dir").symlink_to(secret)
    path = entry.format(secret=secret)
    (data / "mix.txt").write_text(f"a,a.npy\nb,{path}\n")
    grain_sft.open_corpus(data / "mix.txt").save(data / "index.json")
    index = json.loads((data / "index.json").read_text())
    index["shards"][1]["path"] = path
    (data / "index.json").write_text(json.dumps(index))
    folder = data / "folder"
    folder.mkdir()
    (folder / "a.npy").symlink_to(data / path)
    (folder / "b.npy").symlink_to(data / "a.npy")
    for where in (data / "mix.txt", data / "index.json", [data / "a.npy", data / path], folder):
        assert len(grain_sft.open_corpus(where).shards) == 2
        assert len(grain_sft.open_corpus(where, root=data.parent).shards) == 2
        with pytest.raises(CorpusError, match=r"\.npy: lies outside of .*data/.*given as the root of all files"):
            grain_sft.open_corpus(where, root=data)


@pytest.mark.parametrize(
    "path", ["../secret/a.npy", "gs://bucket/a.npy", *(f"gs://bucket/folder/{up}/a.npy" for up in ("..", "%2e%2E"))]
)
def test_a_file_outside_of_the_root_is_not_even_opened(folders, path):
    """Opening the file or the bucket would give another error."""
    data, secret = folders
    (secret / "a.npy").write_bytes(b"no tokens at all")
    (data / "mix.txt").write_text(f"a,{path}\n")
    for root in (data, "gs://other", "gs://bucket/folder", "gs://buck") if "://" in path else (data,):
        with pytest.raises(CorpusError, match="lies outside"):
            grain_sft.open_corpus(data / "mix.txt", root=root)


PARTS = ["token_ids_part_0000.npy", "token_ids_part_0000.csv.gz", "labels_mask_part_0000.npy", "sources.bin"]


@pytest.mark.parametrize("name", ["dataset_statistics.json", *PARTS])
def test_a_file_of_an_sft_corpus_that_becomes_a_link_out_of_it_is_refused(tmp_path, name):
    """Opening the corpus refuses the link. So does reading from a corpus that was opened before the link was made."""
    folder, secret = tmp_path / "data", tmp_path / "secret"
    secret.mkdir()
    write_olmo(folder, documents(), part_tokens=10_000, sources=True)
    (folder / "dataset_statistics.json").write_text("{}")
    bound, free = (pickle.loads(pickle.dumps(grain_sft.open_corpus(folder, root=root))) for root in (folder, None))
    assert bound == free
    (folder / name).rename(secret / name)
    (folder / name).symlink_to(secret / name)
    outside = rf"^\S+{name}: lies outside of .*data/, .*; its real path is .*secret/{name}\. Fix"
    assert grain_sft.open_corpus(folder).documents
    with pytest.raises(CorpusError, match=outside):
        grain_sft.open_corpus(folder, root=folder)

    def read(corpus):
        return corpus.read(0, 10), corpus.documents, corpus.sources

    read(free)
    if not name.endswith(".json"):
        with pytest.raises(CorpusError, match=outside):
            read(bound)
    free.save(folder / "index.json")
    assert '"root"' not in (folder / "index.json").read_text()
    (secret / name).write_bytes(b"secret")
    with pytest.raises(CorpusError, match=outside):  # not that the content is damaged
        grain_sft.open_corpus(folder, root=folder)
