"""Host: one of the processes that share the global batch."""

import dataclasses
from typing import Self

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError


@dataclasses.dataclass(frozen=True)
class Host:
    """Process `index` of the `count` processes that load data. An index outside 0 to `count - 1` is a `SamplerError`."""

    index: int
    count: int

    def __post_init__(self) -> None:
        # plain ints instead of numpy's, so that equal hosts have equal reprs
        object.__setattr__(self, "index", as_integer("host index", self.index, 0, SamplerError))
        object.__setattr__(self, "count", as_integer("host count", self.count, 1, SamplerError))
        if self.index >= self.count:
            problem = f"host index {self.index} of {self.count} hosts: expected 0 to {self.count - 1}"
            raise SamplerError(f"{problem}. Under JAX, take Host.from_jax().")

    @classmethod
    def from_jax(cls) -> Self:
        """Return the host of this JAX process. This starts JAX's backend: call `jax.distributed.initialize` first."""
        import jax

        return cls(jax.process_index(), jax.process_count())
