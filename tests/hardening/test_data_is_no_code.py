"""What is read is data: nothing in it is run, and nothing in it leads to files that the user did not give."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from sft_files import documents, write_olmo

import grain_sft
from grain_sft.errors import CorpusError, RecordError

PACKAGE = Path(grain_sft.__file__).parent

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that run what they are given."""

MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "torch", "code"}
"""Modules whose readers run what they read."""

ALLOWED = {
    # Grain sends its workers what they run; these are written and read by one run's own processes.
    "prepare/work.py": {"pickle"},
    "prepare/worker.py": {"pickle"},
}
UNSAFE_YAML = {"load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader", "UnsafeLoader"}


def nodes():
    """(file, its tree, node) of every node of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            yield path.relative_to(PACKAGE).as_posix(), tree, node


def is_false(node) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_nothing_in_the_package_unpickles_or_evaluates():
    found = []
    for name, _, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_CODE:
            found.append((name, node.lineno, node.func.id))
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        unsafe = {each.split(".")[0] for each in modules} & MODULES - ALLOWED.get(name, set())
        found += [(name, node.lineno, module) for module in unsafe]
    assert not found


def test_every_call_of_numpy_yaml_and_processes_is_of_the_kind_that_runs_nothing():
    seen = 0
    for name, tree, node in nodes():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, called = node.func.value.id if isinstance(node.func.value, ast.Name) else "", node.func.attr
        given = {word.arg: word.value for word in node.keywords}
        where = f"{name}:{node.lineno}"
        assert "trust_remote_code" not in given or is_false(given["trust_remote_code"]), where
        if (owner, called) == ("np", "load"):
            assert is_false(given.get("allow_pickle")), where
        elif (owner, called) == ("yaml", "load"):
            loader = next(each for each in ast.walk(tree) if ast.unparse(node.args[1]) == getattr(each, "name", ""))
            assert isinstance(loader, ast.ClassDef), where
            assert [ast.unparse(base) for base in loader.bases] == ["yaml.SafeLoader"], where
        elif owner == "yaml":
            assert called not in UNSAFE_YAML, where
        elif owner in ("os", "subprocess"):
            assert called not in ("system", "popen") and is_false(given.get("shell", ast.Constant(False))), where
        seen += owner == "yaml"
    assert seen, "the test looks at nothing"


class Bomb:
    def __reduce__(self):
        return os.system, ("touch bomb-went-off",)


TRAINING = ("a/train_idx.npy", "a/train_input_ids.bin", "a/train_labels.bin")


def test_an_array_of_objects_is_never_unpickled_wherever_a_file_is_expected(tmp_path, monkeypatch):
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
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "{{ self._TemplateReference__context.eval_ctx.environment }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ lipsum.__globals__['os'].popen('touch escaped').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ messages.append(1) }}",
    "{{ 'x'.format_map.__self__.__class__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
)


@pytest.mark.parametrize("text", ESCAPES)
def test_a_chat_template_can_not_reach_out_of_its_sandbox(text, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from grain_sft.errors import PrepareError
    from grain_sft.prepare.templates.chat_template import ChatTemplate
    from grain_sft.prepare.tokenizers import load_tokenizer

    monkeypatch.chdir(tmp_path)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<u>": 1}, unk_token="<u>"))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises((RecordError, PrepareError)):
        rendered = ChatTemplate(tokenizer, text).render([{"role": "user", "content": "a"}])
        assert not rendered.strip(), rendered  # an attribute that is undefined renders as nothing
        raise RecordError("it renders as nothing")
    assert not (tmp_path / "escaped").exists()


@pytest.fixture
def folders(tmp_path):
    """A folder of data, and one beside it that is none of its business."""
    for name in ("data", "secret"):
        (tmp_path / name).mkdir()
        np.arange(100, dtype=np.uint32).tofile(tmp_path / name / "a.npy")
    return tmp_path / "data", tmp_path / "secret"


@pytest.mark.parametrize(
    "entry", ["../secret/a.npy", "{secret}/a.npy", "x/../../secret/a.npy", "link.npy", "dir/a.npy"]
)
def test_a_mix_or_an_index_leads_to_no_file_outside_of_the_root(folders, entry):
    """By a relative path, an absolute one or a link; without a root, all of these are what they say."""
    data, secret = folders
    (data / "x").mkdir()
    (data / "link.npy").symlink_to(secret / "a.npy")
    (data / "dir").symlink_to(secret)
    path = entry.format(secret=secret)
    (data / "mix.txt").write_text(f"a,a.npy\nb,{path}\n")
    corpus = grain_sft.open_corpus(data / "mix.txt")
    corpus.save(data / "index.json")
    index = json.loads((data / "index.json").read_text())
    index["shards"][1]["path"] = path
    (data / "index.json").write_text(json.dumps(index))
    for where in (data / "mix.txt", data / "index.json", [data / "a.npy", data / path]):
        assert len(grain_sft.open_corpus(where).shards) == 2
        assert len(grain_sft.open_corpus(where, root=data.parent).shards) == 2
        with pytest.raises(CorpusError, match=r"lies outside of .*data/.*given as the root of all files") as error:
            grain_sft.open_corpus(where, root=data)
        assert "a.npy" in str(error.value) or "link.npy" in str(error.value)


def test_a_file_outside_of_the_root_is_not_even_opened(folders):
    """One that can't be read is refused for where it lies, and not for what it holds."""
    data, secret = folders
    (secret / "a.npy").write_bytes(b"no tokens at all")
    (data / "mix.txt").write_text("a,../secret/a.npy\n")
    with pytest.raises(CorpusError, match="lies outside"):
        grain_sft.open_corpus(data / "mix.txt", root=data)


@pytest.mark.parametrize("name", ["a.npy", "folder/../a.npy"])
def test_a_root_bounds_urls_too(folders, name):
    data, _ = folders
    (data / "mix.txt").write_text(f"a,gs://bucket/{name}\n")
    for root in (data, "gs://other", "gs://bucket/folder", "gs://buck"):
        with pytest.raises(CorpusError, match="lies outside"):
            grain_sft.open_corpus(data / "mix.txt", root=root)


def test_a_link_out_of_a_folder_of_token_files_is_refused_too(folders):
    data, secret = folders
    assert len(grain_sft.open_corpus(data, root=data).shards) == 1
    (data / "b.npy").symlink_to(secret / "a.npy")
    assert len(grain_sft.open_corpus(data).shards) == 2
    with pytest.raises(CorpusError, match=r"b\.npy: lies outside"):
        grain_sft.open_corpus(data, root=data)


@pytest.fixture
def sft(tmp_path):
    """`sft(name)`: puts a file of an SFT corpus outside of it, behind a link; and the corpus's folder."""
    folder, secret = tmp_path / "data", tmp_path / "secret"
    secret.mkdir()
    write_olmo(folder, documents(), part_tokens=10_000, sources=True)
    (folder / "dataset_statistics.json").write_text("{}")

    def move(name):
        (folder / name).rename(secret / name)
        (folder / name).symlink_to(secret / name)

    return move, folder


PARTS = ("token_ids_part_0000.csv.gz", "labels_mask_part_0000.npy", "sources.bin")


@pytest.mark.parametrize("name", ["dataset_statistics.json", *PARTS])
def test_a_link_out_of_an_sft_corpus_is_refused_too(sft, name):
    move, folder = sft
    assert grain_sft.open_corpus(folder, root=folder).documents
    move(name)
    assert grain_sft.open_corpus(folder).documents
    with pytest.raises(CorpusError, match=rf"{name}: lies outside of .*data/ \(it is .*secret/{name}\)"):
        grain_sft.open_corpus(folder, root=folder)


@pytest.mark.parametrize("name", ["token_ids_part_0000.npy", *PARTS])
def test_a_file_that_becomes_a_link_out_of_the_root_is_refused_when_it_is_opened(sft, name):
    move, folder = sft
    bound, free = (pickle.loads(pickle.dumps(grain_sft.open_corpus(folder, root=root))) for root in (folder, None))
    assert bound == free
    move(name)

    def read(corpus):
        return corpus.read(0, 10), corpus.documents, corpus.sources

    read(free)
    with pytest.raises(CorpusError, match=rf"{name}: lies outside"):
        read(bound)
    free.save(folder / "index.json")
    assert '"root"' not in (folder / "index.json").read_text()
