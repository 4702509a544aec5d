"""Fields that other servers have under another name: each is taken as the field that it means."""

from __future__ import annotations

from typing import Annotated, ClassVar

from penstock import sampling
from penstock.errors import BadRequest
from penstock.server.fields.unsupported import UnsupportedFields
from penstock.server.fields.whole_numbers import Count, Limit, Seed  # noqa: TC001

_NAMES = {
    "repeat_penalty": "repetition_penalty",  # llama.cpp
    "min_new_tokens": "min_tokens",  # SGLang
    "sampling_seed": "seed",
}


class AliasedFields(UnsupportedFields, kw_only=True):
    """The other names. They are None once the body is decoded."""

    length_field: ClassVar[str]  # what the protocol calls the longest answer
    length_aliases: ClassVar[tuple[str, ...]] = ("n_predict", "max_new_tokens")

    repeat_penalty: Annotated[float, sampling.range_of("repetition_penalty")] | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    n_predict: Limit | None = None
    max_new_tokens: Limit | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for alias, name in _NAMES.items():
            self._take(alias, name)
        for alias in self.length_aliases:
            self._take(alias, self.length_field)

    def _take(self, alias: str, name: str) -> None:
        said = getattr(self, alias)
        if said is None:
            return
        if getattr(self, name) not in (None, said):
            raise BadRequest(
                f"`{alias}` and `{name}` are two names of one field and say different things.",
                param=alias,
            )
        setattr(self, name, said)
        setattr(self, alias, None)
