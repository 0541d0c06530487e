"""Objects of the driver's made without its constructors, as others of their kind were made before.

The driver makes a session for each command, and a database and a collection each time a name is said; most of that is looking
up options and checks that cannot end differently the second time.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any


class Mould:
    """Know what the driver's constructor made of everything but the owner, to whom nothing here refers.

    Args:
        made: An object that nothing has changed since.
        owner: The object that made it, which is the value of one of its attributes.
        *apart: Attributes that each object has for itself.
    """

    __slots__ = ("_kind", "_owner_attribute", "_state")

    def __init__(self, made: Any, owner: Any, *apart: str) -> None:
        self._kind = type(made)
        (self._owner_attribute,) = (name for name, value in vars(made).items() if value is owner)
        self._state = {name: value for name, value in vars(made).items() if name not in (self._owner_attribute, *apart)}

    def cast(self, owner: Any, **own: Any) -> Any:
        """Return a new object.

        Args:
            owner: Its owner.
            **own: Other attributes.
        """
        made = object.__new__(self._kind)
        made.__dict__ = {**self._state, self._owner_attribute: owner, **own}
        return made


NO_MOULDS: MappingProxyType[str, Mould] = MappingProxyType({})
