"""Checks that a sampler fits its source, and that transforms return batches."""

import grain

from grain_sft.arguments import check_type
from grain_sft.errors import PipelineError, shortened
from grain_sft.pipeline.run import Run
from grain_sft.registry import entry_errors, name_of
from grain_sft.sampling import Sampler
from grain_sft.source import Element, MixtureSource, NpyDataSource


def mapped(transform: grain.transforms.Map, element: Element, num_rows: int, step: int) -> Element:
    """Return `transform.map(element)`.

    Raises:
      PipelineError: The transform raised an exception, or returned None or an array [m, …] with m other than `num_rows`.
    """
    try:
        batch: Element = transform.map(element)
    except Exception as error:  # `entry_errors` makes the message; entering it for each batch would take time
        where = f"step {step}: transform {name_of(type(transform))}"
        with entry_errors(PipelineError, where, "Fix its code, or its options."):
            raise error
    if batch is None:
        found = f"step {step}: transform {name_of(type(transform))}"
        raise PipelineError(f"{found} returned None. Return the batch from its `map`.")
    for key, array in (batch if isinstance(batch, dict) else {}).items():
        if getattr(array, "ndim", 0) > 1 and len(array) != num_rows:
            found = f"step {step}: transform {name_of(type(transform))} returned {len(array)} rows of {key!r}"
            fix = "Keep all rows, and mask the loss of unwanted rows"
            raise PipelineError(f"{found}; expected the {num_rows} rows of the batch. {fix}.")
    return batch


def batch_of_arrays(pipeline: Run, step: int) -> Element:
    """Return `pipeline[step]`, and check that it is a dict of arrays and scalars. An iterator does not check this.

    Raises:
      PipelineError: The batch is something else.
    """
    batch = pipeline[step]
    lists = [key for key, array in batch.items() if isinstance(array, list)] if isinstance(batch, dict) else []
    if lists or not isinstance(batch, dict) or not batch:
        found = f"{lists[0]!r} of the batch is a list" if lists else f"the batch is {shortened(repr(batch))}"
        raise PipelineError(f"step {step}: {found}; expected a dict of arrays. Fix the `map` of the transforms.")
    return batch


def check_rows(source: NpyDataSource | MixtureSource, sampler: Sampler) -> None:
    """Raise a `PipelineError` if the sampler is for another number of rows, or for a mixture of other sources."""
    check_type("source", source, NpyDataSource | MixtureSource, "NpyDataSource(layout), or a MixtureSource")
    check_type("sampler", sampler, Sampler, "a sampler, such as IndexSampler(len(source), ...)")
    if sampler.num_instances != len(source):
        problem = f"the sampler is for {sampler.num_instances} rows, but the source has {len(source)}"
        raise PipelineError(f"{problem}. Make the sampler with IndexSampler(len(source), ...).")
    of_sampler = {stream.name: stream.source.num_instances for stream in sampler.streams}
    of_source = {name: len(layout) for name, layout in source.layout.parts.items()}
    # A layout that is not a mixture has one part, named "". The items are compared as lists, because their order counts.
    if "" not in of_source and list(of_sampler.items()) != list(of_source.items()):
        found = f"the sampler is for these sources and numbers of rows: {of_sampler}"
        problem = f"{found}. The source has {of_source}, in this order"
        raise PipelineError(f"{problem}. Make a MixtureSampler of the sources of the MixtureSource.")
