"""Rows that the repetition filters of a pipeline, such as `NgramFilter`, reject."""

from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.layout import FILL_ROW
from grain_sft.pipeline import Pipeline
from grain_sft.transforms import NgramFilter, trait
from grain_sft.view.text import TokenTexts, visible

_MOST_EXAMPLES = 5
_EXAMPLE_TOKENS = 48  # maximum number of tokens in an example; a longer n-gram is shown once, in full


def rejected_rows(pipeline: Pipeline, steps: list[int], texts: TokenTexts) -> dict[str, Any]:
    """Return counts and examples of the rows of `steps` that the pipeline's filters, such as `NgramFilter`, reject.

    If the pipeline has no filter, `NgramFilter()` is used.

    Returns:
      filter: repr of each filter, joined with commas.
      used: Whether the pipeline has a filter.
      rows, rejected: Number of all rows, and number of rejected rows.
      rejected_for_padding: Number of rejected rows that would pass without their padding.
      examples: Up to 5 of the other rejected rows, as dicts of `step`, `instance` (the row's number), and the values of
        `_example`.
    """
    own_filters = [transform for transform in pipeline.transforms if trait(transform, "filters_repetition")]
    filters = own_filters or [NgramFilter()]
    counts = {"rows": 0, "rejected": 0, "rejected_for_padding": 0}
    examples: list[dict[str, Any]] = []
    for step in steps:
        rows = pipeline.sampler.rows(step)
        rows = rows[rows != FILL_ROW]
        element = pipeline.source_at(step).read(rows)
        failing = np.flatnonzero(np.any([each.fails(element["tokens"], element["segment_ids"]) for each in filters], axis=0))
        counts["rows"] += len(rows)
        counts["rejected"] += len(failing)
        for index in failing.tolist():
            tokens = element["tokens"][index].astype(np.int64)
            padding = element["segment_ids"][index] == 0
            tokens[padding] = -1 - np.arange(np.count_nonzero(padding))  # numbers that never repeat
            rejecting = [each for each in filters if each.fails(tokens)]  # filters that reject the row without its padding
            if not rejecting:
                counts["rejected_for_padding"] += 1
            elif len(examples) < _MOST_EXAMPLES:
                examples.append({"step": step, "instance": int(rows[index])} | _example(tokens, rejecting[0], texts))
    return {"filter": ", ".join(map(repr, filters)), "used": bool(own_filters), **counts, "examples": examples}


def _example(tokens: npt.NDArray[np.int64], ngram_filter: NgramFilter, texts: TokenTexts) -> dict[str, Any]:
    """Return the longest repetition in a rejected row, as `at`, `period`, `times` and `text`.

    From token `at` on, the same `period` tokens come `times` times in succession; `text` shows them. Repetitions of at least
    `ngram_filter.repeats` times, which the filter rejects, are preferred to others. Of these, the longest is returned.
    """
    # a filter of another class may lack these attributes, and gets the defaults of `NgramFilter`
    names, defaults = ("min_period", "max_period", "repeats"), NgramFilter()
    min_period, max_period, repeats = (getattr(ngram_filter, name, getattr(defaults, name)) for name in names)
    repetitions = [(0, 1, 1)]  # (first token, period, times); this entry is for a row without any repetition
    # `repeats` is at least 3, so a period of a rejected row is at most a third of the row
    for period in range(min_period, min(max_period, len(tokens) // 3) + 1):
        equal = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
        # tokens `starts[i]` to `ends[i] - 1` equal the tokens one period later
        starts, ends = np.flatnonzero(np.diff(equal)).reshape(-1, 2).T
        if len(starts):
            longest = int((ends - starts).argmax())
            # `period` tokens that come n times are (n - 1) * period tokens that equal the tokens one period later
            repetitions.append((int(starts[longest]), period, int(ends[longest] - starts[longest]) // period + 1))
    first, period, times = max(repetitions, key=lambda each: (each[2] >= repeats, each[1] * each[2]))
    ids = tokens[first : first + min(period * times, max(_EXAMPLE_TOKENS, period))].tolist()
    raw_texts = [(token, texts.text(token)) for token in ids]
    joined = "".join(f" ⟨{token}⟩" if text is None else text for token, text in raw_texts)
    # joins the bytes of a character that several tokens share
    whole = joined.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return {"at": first, "period": period, "times": times, "text": visible(whole.strip())}
