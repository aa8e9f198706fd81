"""Every error is a `GrainSftError`. It is pickled with its message, because worker processes send their errors."""

import pickle

import numpy as np
import pytest

from grain_sft import GrainSftError, Host, NgramFilter, arguments, errors, open_corpus

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GrainSftError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_pickles_with_its_message(kind):
    copy = pickle.loads(pickle.dumps(kind("where: expected this, found that")))
    assert type(copy) is kind and str(copy) == "where: expected this, found that"


def test_the_error_of_a_missing_extra_still_names_the_extra_after_pickling():
    error = pickle.loads(pickle.dumps(errors.MissingExtraError.of("a.parquet: reading Parquet", "pyarrow", "parquet")))
    assert isinstance(error, ImportError)
    assert "Run `pip install '.[parquet]'` in the checkout of grain_sft." in str(error)


@pytest.mark.parametrize("text", ["from os import nothing_of_that_name", "import nothing_of_that_name"])
def test_a_package_that_fails_to_import_is_not_called_missing(tmp_path, monkeypatch, text):
    (tmp_path / "broken_here.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.MissingExtraError, match=r"which fails to import .*nothing_of_that_name"):
        errors.import_extra("broken_here", "reading Parquet", "broken_here", "parquet")


@pytest.mark.parametrize("make", [lambda: Host("0", 2), lambda: Host(0.5, 2), lambda: NgramFilter(max_period=5.7)])
def test_wrong_types_raise_a_grain_sft_error(make):
    with pytest.raises(GrainSftError, match="expected an integer"):
        make()


def test_booleans_and_arrays_of_zero_dimensions_raise_a_grain_sft_error():
    checks = [(arguments.as_pair, errors.PipelineError), (arguments.as_objects, Host)]
    for check, kind in (*checks, (arguments.as_integers, errors.RowIndexError)):
        for values in ([True], np.array(5)):
            with pytest.raises(GrainSftError, match=r"(array\(5\)|True).*expected"):
                check("values", values, kind)
    with pytest.raises(GrainSftError, match=r"array\(5\).*expected"):
        open_corpus(np.array(5))


def test_a_set_of_paths_is_refused_because_it_has_no_order():
    with pytest.raises(errors.WrongTypeError, match=r"\(set\); expected a path or a list of paths"):
        open_corpus({"a.npy", "b.npy"})
