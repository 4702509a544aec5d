"""Whole numbers of a body, which some clients write as floats: 8.0 is taken as 8."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, inspect

from penstock import sampling
from penstock.errors import BadRequest

_INT64 = sampling.INT64
_EXACT = 2**53  # the largest float up to which every whole number is one


def _whole(low: float, high: float) -> Any:
    low, high = int(low), int(high)
    return (
        Annotated[int, Meta(ge=low, le=high)]
        | Annotated[float, Meta(ge=max(low, -_EXACT), le=min(high, _EXACT))]
    )


if TYPE_CHECKING:
    Count = int
    Positive = int
    Limit = int
    SmallCount = int
    Choices = int
    Seed = int
    Priority = int
    TopK = int
    PenaltyWindow = int
else:
    Count = _whole(0, _INT64)
    Positive = _whole(1, _INT64)
    Limit = _whole(-1, _INT64)  # of tokens; -1: as many as there is room for
    SmallCount = _whole(0, 20)  # of alternatives to a token
    Choices = _whole(1, 128)
    Seed = _whole(-(2**63), _INT64)
    Priority = _whole(-(2**31), 2**31 - 1)
    TopK = _whole(sampling.BY_NAME["top_k"].low, sampling.BY_NAME["top_k"].high)
    PenaltyWindow = _whole(-1, _INT64)  # tokens that penalties count; -1: all


class WholeNumbers(msgspec.Struct):
    """A body, or a part of one, whose fields of these types are ints once it is decoded."""

    def __post_init__(self) -> None:
        for name in _whole_fields(type(self)):
            value: object = getattr(self, name)
            if isinstance(value, float):
                if not value.is_integer():
                    raise BadRequest(f"`{name}` is {value}; it is a whole number.", param=name)
                setattr(self, name, int(value))


@cache
def _whole_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return tuple(field.name for field in described.fields if _is_whole(field.type))


def _is_whole(kind: inspect.Type) -> bool:
    if not isinstance(kind, inspect.UnionType):
        return False
    kinds = {type(each) for each in kind.types}
    return {inspect.IntType, inspect.FloatType} <= kinds
