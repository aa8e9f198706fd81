"""Exceptions of grain_sft. Each message says where the problem is, what was expected, what was found and what to do."""

import importlib
from typing import Any, Self


class GrainSftError(Exception):
    """Base class of the errors that grain_sft raises."""


class CorpusError(GrainSftError, ValueError):
    """Token files, a mix file or a saved index with invalid content, or an argument that does not fit a corpus."""


class WrongTypeError(GrainSftError, TypeError):
    """An argument of the wrong type."""


class CorpusFileError(GrainSftError, OSError):
    """A token file, mix file or saved index that is missing or unreadable, or a token file that changed after indexing."""


class RemoteTimeoutError(CorpusFileError):
    """A remote file that could not be read before the retry deadline."""


class LayoutError(GrainSftError, ValueError):
    """A layout that can't be made of this corpus."""


class SamplerError(GrainSftError, ValueError):
    """A sampler's arguments that don't fit together."""


class TransformError(GrainSftError, ValueError):
    """A row or batch that a transform can't take."""


class PipelineError(GrainSftError, ValueError):
    """Parts of a pipeline that don't fit together, an iterator state of another pipeline, or a child process that fails."""


class ConfigError(GrainSftError, ValueError):
    """A config with a missing, unknown or wrong key."""


class RowIndexError(GrainSftError, IndexError):
    """A number of a row, record or step that is out of range."""


class StorageError(GrainSftError, OSError):
    """A file written by grain_sft (index, order, cache) that can't be written or read."""


class RecordError(GrainSftError, ValueError):
    """A record that can't be decoded, or that is not what its schema or template expects.

    Attributes:
      record: Raw bytes of a record that could not be decoded; empty for a record that was decoded.
    """

    record: bytes = b""


class PrepareError(GrainSftError, ValueError):
    """Options of a preparation that don't fit together or don't fit its inputs, or an output that can't be used."""


class MissingExtraError(GrainSftError, ImportError):
    """A feature whose optional dependency is not installed, or fails to import."""

    @classmethod
    def of(cls, feature: str, package: str, extra: str) -> Self:
        """Return the error for a feature that needs `package`. `extra` is the extra of grain_sft that installs the package."""
        command = install_command(extra)
        return cls(f"{feature} needs {package}, which is not installed. Run `{command}` in the checkout of grain_sft.")


def import_extra(module: str, feature: str, package: str, extra: str) -> Any:
    """Import a module for a feature that needs the optional `package`, or raise a MissingExtraError that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # whether `module` itself or a parent package is missing, not a dependency of `module`
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise MissingExtraError.of(feature, package, extra) from error
        problem = f"{feature} needs {package}, which fails to import ({error})"
        fix = f"Install it again with its dependencies: `{install_command(extra)}` in the checkout of grain_sft"
        raise MissingExtraError(f"{problem}. {fix}.") from error


def install_command(extra: str) -> str:
    """Return the command that installs `extra` in a checkout: grain_sft is not on PyPI."""
    return f"pip install '.[{extra}]'"


def shortened(text: str, max_length: int = 80) -> str:
    """Return `text` for a message, in at most `max_length` characters."""
    return text if len(text) <= max_length else text[: max_length - 3] + "..."
