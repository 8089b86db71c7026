"""Adding a name to an enum of a framework that takes its attention backends from a closed list."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Enum)


def add_member(enum: type[Member], value: str) -> Member:
    """Return the member of ``enum`` with this value, adding it on the first call.

    Its name is the value in capitals. It stays for the life of the process, iterates, compares and
    pickles as any other; other processes read the pickle if they have added it, too.
    """
    name = value.upper()
    known = enum.__members__.get(name)
    if known is not None:
        return known
    cls: Any = enum
    mixed_in = cls._member_type_
    made = object.__new__(cls) if mixed_in is object else mixed_in.__new__(cls, value)
    made._name_ = name
    made._value_ = value
    made.__objclass__ = cls
    made._sort_order_ = len(cls._member_names_)
    type.__setattr__(cls, name, made)
    cls._member_names_.append(name)
    cls._member_map_[name] = made
    cls._value2member_map_[value] = made
    member: Member = made
    return member
