"""Changing the class of one instance in place, under the old class's name, so that it can be copied, pickled and undone."""

from __future__ import annotations

import functools
from typing import Any


class InPlaceSubclass:
    """Base of the mixins that `swap_class` puts in front of an instance's own class."""

    _bft_original_class: type
    _bft_mixin: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The default names the class by module and name, where the original stands.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_swapped, (self._bft_original_class, self._bft_mixin), *reduced[2:]


def swap_class(instance: Any, mixin: Any) -> None:
    """Make `instance` an instance of `mixin` and its own class, under that class's name. Other instances are untouched.

    The name matters: device_map and FSDP find the layers that they must not split by the name of their class.
    """
    instance.__class__ = _swapped_class(type(instance), mixin)  # type: ignore[arg-type]


def restore_class(instance: Any) -> None:
    """Undo `swap_class`."""
    instance.__class__ = instance._bft_original_class


def is_swapped(instance: Any) -> bool:
    """Whether the instance's class is what `swap_class` made of it, and nothing was put over that since."""
    cls: Any = type(instance)
    return cls is _swapped_class(instance._bft_original_class, instance._bft_mixin)


@functools.cache
def _swapped_class(original: Any, mixin: Any) -> Any:
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_bft_original_class": original,
        "_bft_mixin": mixin,
    }
    return type(original.__name__, (mixin, original), names)


def _new_swapped(original: Any, mixin: Any) -> Any:
    cls = _swapped_class(original, mixin)
    return cls.__new__(cls)
